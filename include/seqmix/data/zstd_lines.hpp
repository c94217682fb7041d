#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <zstd.h>

#include <seqmix/data/lines.hpp>
#include <seqmix/tensor/error.hpp>

namespace seqmix::inline v0::data {

/// The decompressed bytes of a .zst file (one frame or several), as a stream; needs libzstd.
class zstd_source {
 public:
  explicit zstd_source(std::string path)
      : file_(std::move(path)), stream_(ZSTD_createDStream()), block_(ZSTD_DStreamInSize()) {
    if (!stream_) throw file_error("seqmix: zstd: no memory for the decompressor of " + file_.path());
  }

  std::string const& path() const noexcept { return file_.path(); }

  /// As file_source::read. Throws file_error when the data are not zstd or end inside a frame.
  std::size_t read(std::span<char> into) {
    ZSTD_outBuffer out{into.data(), into.size(), 0};
    while (out.pos == 0) {
      bool const ended = in_.pos == in_.size && !refill();
      if (ended && unfinished_ == 0) break;
      unfinished_ = ZSTD_decompressStream(stream_.get(), &out, &in_);
      if (ZSTD_isError(unfinished_) != 0)
        throw file_error("seqmix: zstd: " + path() + " is damaged: " + ZSTD_getErrorName(unfinished_));
      // Without input only what the decompressor still holds can come; when nothing does, the frame is torn.
      if (ended && out.pos == 0 && unfinished_ != 0)
        throw file_error("seqmix: zstd: " + path() + " ends inside a compressed frame (an unfinished download?)");
    }
    return out.pos;
  }

 private:
  struct free_stream {
    void operator()(ZSTD_DStream* stream) const noexcept { ZSTD_freeDStream(stream); }
  };

  bool refill() {
    in_ = {block_.data(), file_.read(block_), 0};
    return in_.size > 0;
  }

  file_source file_;
  std::unique_ptr<ZSTD_DStream, free_stream> stream_;
  std::vector<char> block_;
  ZSTD_inBuffer in_{nullptr, 0, 0};
  std::size_t unfinished_ = 0;  // 0 between frames, with nothing left to give
};

}  // namespace seqmix::inline v0::data
