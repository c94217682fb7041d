#pragma once

#include <atomic>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <seqmix/data/byte_corpus.hpp>
#include <seqmix/data/windows.hpp>
#include <seqmix/models/arbitrary_selection.hpp>

/// Studies of base capability: every architecture is trained on the same tokens of one domain and measured on that
/// domain and on others. This file has what the programs and their parts share.
namespace study {

using seqmix::index_t;

/// One domain of text; windows are the same for all architectures.
struct domain {
  std::string name;
  bool trained_on = false;
  bool code = false;
  seqmix::data::byte_corpus text;
  std::vector<seqmix::data::window> short_windows, long_windows;
};

struct settings {
  std::string program;  ///< begins every sentence it says
  std::filesystem::path text, out;
  std::vector<std::string> architectures;  ///< the first is the reference of the gaps
  double minutes = 9.5;                    ///< training and evaluation of all architectures
  index_t steps = 0;                       ///< 0: from `minutes`
  std::uint64_t seed = 1;
  bool resume = false;
  int threads = 1;
  index_t block = 256, batch = 16, chunk = 16;
  index_t window = 0;  ///< 0: the program has no architecture with a window
  double learning_rate = 2e-3;
  index_t short_bytes = 16384, long_bytes = 131072;  ///< measured per domain at a point, and at the end
};

/// Loss in bits per byte of every domain after some steps; all points of all architectures are measured on the same
/// short windows, the last one on the long ones too.
struct point {
  index_t step = 0, tokens = 0;
  std::map<std::string, double> bits, final_bits;
};

struct result {
  std::string name;
  index_t parameters = 0;  ///< outside the embedding
  double tokens_per_second = 0.0;
  double visible = 0.0;  ///< mean number of tokens a query draws on
  bool selects_arbitrarily = false;
  std::vector<point> points;
};

/// What the program knows of an architecture; each is compiled in a file of its own.
class architecture {
 public:
  virtual ~architecture() = default;
  virtual std::string name() const = 0;
  virtual index_t parameters() const = 0;
  virtual std::vector<std::string> without_weight_decay() const = 0;
  /// Trains for at least this long (and one step behind a first one) and returns the seconds a step took.
  virtual double seconds_per_step(settings const&, std::vector<domain> const&, double at_least) const = 0;
  /// Trains to the end or until stopped; measures at the given steps. Returns whether it got to the end.
  virtual bool run(settings const&, std::vector<domain> const&, index_t steps,
                   std::vector<index_t> const& measured_after, std::atomic<bool> const& stop,
                   result& out) const = 0;
};

/// The domain that is trained on; load_domains makes sure that there is one.
domain const& training_domain(std::vector<domain> const& domains);

/// Loads the prepared text and cuts its evaluation windows. Throws file_error for text that is missing or too
/// short.
std::vector<domain> load_domains(settings const&);

}  // namespace study
