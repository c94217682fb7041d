#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <unistd.h>
#include <vector>

#include <doctest/doctest.h>

#include <seqmix/data/byte_corpus.hpp>

namespace {

namespace fs = std::filesystem;
using namespace seqmix;

/// A fresh folder that goes when the test ends.
struct scratch {
  fs::path path = fs::temp_directory_path() / ("seqmix_byte_corpus_" + std::to_string(::getpid()));
  scratch() {
    fs::remove_all(path);
    fs::create_directories(path);
  }
  scratch(scratch const&) = delete;
  scratch& operator=(scratch const&) = delete;
  ~scratch() { fs::remove_all(path); }

  std::string write(std::string const& name, std::string const& bytes) const {
    std::ofstream(path / name, std::ios::binary) << bytes;
    return (path / name).string();
  }
};

DOCTEST_TEST_CASE("P-T4: bytes above 127 are tokens above 127, and none is lost") {
  scratch const folder;
  std::string all;
  for (int c = 0; c < 256; ++c) all += char(c);
  auto const bytes = data::read_bytes(folder.write("all", all));
  DOCTEST_REQUIRE(bytes.size() == 256);
  for (std::size_t i = 0; i < bytes.size(); ++i) DOCTEST_CHECK(bytes[i] == i);
  DOCTEST_CHECK(int(bytes[0xFF]) == 255);
}

DOCTEST_TEST_CASE("P-T4: a missing, empty or too short corpus is an error that names path and sizes") {
  scratch const folder;
  auto const at = folder.path.string();
  DOCTEST_CHECK_THROWS_WITH_AS(
      data::read_bytes(at + "/none.txt"),
      ("seqmix: byte corpus: cannot open " + at + "/none.txt: No such file or directory").c_str(), file_error);
  DOCTEST_CHECK_THROWS_WITH_AS(
      data::read_bytes(folder.write("empty.txt", ""), 9),
      ("seqmix: byte corpus: " + at + "/empty.txt is empty: expected at least 9 bytes, got 0").c_str(), file_error);
  DOCTEST_CHECK_THROWS_WITH_AS(
      data::read_bytes(folder.write("short.txt", "12345678"), 9),
      ("seqmix: byte corpus: " + at + "/short.txt is too short: expected at least 9 bytes, got 8").c_str(),
      file_error);
  DOCTEST_CHECK_THROWS_WITH_AS(data::read_bytes(at),
                               ("seqmix: byte corpus: cannot read " + at + ": Is a directory").c_str(), file_error);
}

DOCTEST_TEST_CASE("a corpus loads its three parts, or the test part alone") {
  scratch const folder;
  folder.write("test.txt", "test text");
  auto const test_only = data::load_corpus(folder.path.string(), "books", 9, data::corpus_parts::test_only);
  DOCTEST_CHECK(test_only.test.size() == 9);
  DOCTEST_CHECK(test_only.train.empty());
  DOCTEST_CHECK_THROWS_AS(data::load_corpus(folder.path.string(), "books", 9), file_error);
  folder.write("validation.txt", "validation");
  folder.write("train.txt", "training text");
  auto const corpus = data::load_corpus(folder.path.string(), "books", 9);
  DOCTEST_CHECK(corpus.name == "books");
  DOCTEST_CHECK(corpus.train.size() == 13);
  DOCTEST_CHECK(corpus.validation.size() == 10);
  DOCTEST_CHECK(corpus.train.front() == 't');
  DOCTEST_CHECK_THROWS_AS(data::load_corpus(folder.path.string(), "books", 10), file_error);
}

DOCTEST_TEST_CASE("reading stops at the given size, and reads past one block") {
  scratch const folder;
  auto const path = folder.write("big.txt", std::string(2500000, 'x'));
  DOCTEST_CHECK(data::read_bytes(path).size() == 2500000);
  DOCTEST_CHECK(data::read_bytes(path, 1, 1500000).size() == 1500000);
  DOCTEST_CHECK(data::read_bytes(path, 1, 7).size() == 7);
}

}  // namespace
