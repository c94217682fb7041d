#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <unistd.h>
#include <vector>

#include <doctest/doctest.h>
#include <zstd.h>

#include <seqmix/data/slimpajama.hpp>

namespace {

namespace fs = std::filesystem;
using namespace seqmix;
using data::slimpajama_set;

struct scratch {
  fs::path path = fs::temp_directory_path() / ("seqmix_slimpajama_" + std::to_string(::getpid()));
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

std::string record(std::string const& text, std::string const& set) {
  return R"({"text":")" + text + R"(","meta":{"redpajama_set_name":"RedPajama)" + set + "\"}}";
}

std::string compressed(std::string const& bytes) {
  std::string out(ZSTD_compressBound(bytes.size()), '\0');
  out.resize(ZSTD_compress(out.data(), out.size(), bytes.data(), bytes.size(), 3));
  return out;
}

struct taken_document {
  slimpajama_set set;
  std::string text;
  std::uint64_t line;
  bool operator==(taken_document const&) const = default;
};

std::vector<taken_document> read(std::string const& path, std::size_t bytes_per_set = 1000000) {
  std::vector<taken_document> documents;
  data::slimpajama_count taken{};
  data::read_slimpajama(path, bytes_per_set, taken,
                        [&](slimpajama_set set, std::string_view text, std::uint64_t line) {
                          documents.push_back({set, std::string(text), line});
                        });
  return documents;
}

std::string const one_of_each = record("web \\u00fc\\n2", "CommonCrawl") + "\n" + record("c4", "C4") + "\n" +
                                record("git", "Github") + "\r\n\n" + record("book", "Book") + "\n" +
                                record("arxiv", "ArXiv") + "\n" + record("wiki", "Wikipedia") + "\n" +
                                record("stack", "StackExchange");

DOCTEST_TEST_CASE("SlimPajama: documents are sorted into their sets, from plain and from compressed lines") {
  scratch const folder;
  std::vector<taken_document> const expected{{slimpajama_set::common_crawl, "web \xC3\xBC\n2", 1},
                                             {slimpajama_set::c4, "c4", 2},
                                             {slimpajama_set::github, "git", 3},
                                             {slimpajama_set::book, "book", 5},
                                             {slimpajama_set::arxiv, "arxiv", 6},
                                             {slimpajama_set::wikipedia, "wiki", 7},
                                             {slimpajama_set::stack_exchange, "stack", 8}};
  DOCTEST_CHECK(read(folder.write("a.jsonl", one_of_each)) == expected);
  DOCTEST_CHECK(read(folder.write("a.jsonl.zst", compressed(one_of_each))) == expected);
  auto const half = one_of_each.size() / 2;
  auto const frames = compressed(one_of_each.substr(0, half)) + compressed(one_of_each.substr(half));
  DOCTEST_CHECK(read(folder.write("frames.jsonl.zst", frames)) == expected);
}

DOCTEST_TEST_CASE("SlimPajama: CommonCrawl and C4 are the training domain") {
  int inside = 0;
  for (std::size_t i = 0; i < data::slimpajama_set_names.size(); ++i)
    inside += data::in_domain(slimpajama_set(i)) ? 1 : 0;
  DOCTEST_CHECK(inside == 2);
  DOCTEST_CHECK(data::in_domain(slimpajama_set::common_crawl));
  DOCTEST_CHECK(data::in_domain(slimpajama_set::c4));
  DOCTEST_CHECK(data::name_of(slimpajama_set::stack_exchange) == "RedPajamaStackExchange");
}

DOCTEST_TEST_CASE("SlimPajama: a set takes no more than its limit, counted over files, cut between characters") {
  scratch const folder;
  auto const path = folder.write("a.jsonl", record("12345", "C4") + "\n" + record("123\\u00fc5", "C4") + "\n" +
                                                record("never", "C4") + "\n" + record("b", "Book") + "\n");
  auto const documents = read(path, 9);
  DOCTEST_REQUIRE(documents.size() == 3);
  DOCTEST_CHECK(documents[1].text == "123");
  DOCTEST_CHECK(documents[2].set == slimpajama_set::book);
  data::slimpajama_count taken{};
  std::size_t bytes = 0;
  for (int i = 0; i < 3; ++i)
    data::read_slimpajama(path, 12, taken, [&](slimpajama_set set, std::string_view text, std::uint64_t) {
      bytes += set == slimpajama_set::c4 ? text.size() : 0;
    });
  DOCTEST_CHECK(bytes <= 12);
  DOCTEST_CHECK(bytes >= 11);
}

DOCTEST_TEST_CASE("SlimPajama: reading ends when every set is full, so that a huge file is read partly") {
  scratch const folder;
  auto const path = folder.write("a.jsonl", one_of_each + "\nthis line would be an error");
  DOCTEST_CHECK(read(path, 2).size() == 7);
  DOCTEST_CHECK_THROWS_AS(read(path, 100), data::record_error);
}

DOCTEST_TEST_CASE("SlimPajama: a bad record is an error with file and line") {
  scratch const folder;
  auto const good = record("fine", "C4") + "\n";
  struct bad_line {
    std::string line, part;
  };
  std::vector<bad_line> const bad_lines{
      {record("torn", "C4").substr(0, 30), "not a JSON record (30 bytes"},
      {"[1,2]", "expected a string in \"text\""},
      {R"({"meta":{"redpajama_set_name":"RedPajamaC4"}})", "expected a string in \"text\""},
      {R"({"text":7,"meta":{"redpajama_set_name":"RedPajamaC4"}})", "expected a string in \"text\""},
      {R"({"text":"a"})", "\"meta\".\"redpajama_set_name\""},
      {R"({"text":"a","meta":"RedPajamaC4"})", "\"meta\".\"redpajama_set_name\""},
      {R"({"text":"a","meta":{}})", "\"meta\".\"redpajama_set_name\""},
      {R"({"text":"a","meta":{"redpajama_set_name":null}})", "\"meta\".\"redpajama_set_name\""},
      {record("a", "Tweets"), "unknown set \"RedPajamaTweets\""},
      {"{\"text\":\"\xFF\",\"meta\":{\"redpajama_set_name\":\"RedPajamaC4\"}}", "not a JSON record"}};
  for (auto const& bad : bad_lines) {
    DOCTEST_CAPTURE(bad.line);
    auto const path = folder.write("bad.jsonl", good + good + bad.line);
    try {
      read(path);
      DOCTEST_FAIL_CHECK("no error");
    } catch (data::record_error const& failure) {
      DOCTEST_CHECK(failure.line == 3);
      DOCTEST_CHECK(failure.path == path);
      DOCTEST_CHECK(std::string(failure.what()).starts_with("seqmix: slimpajama: " + path + " line 3: "));
      DOCTEST_CHECK(std::string(failure.what()).find(bad.part) != std::string::npos);
    }
  }
}

DOCTEST_TEST_CASE("SlimPajama: a missing, empty, damaged or unfinished file is an error") {
  scratch const folder;
  DOCTEST_CHECK_THROWS_AS(read((folder.path / "none.jsonl").string()), file_error);
  DOCTEST_CHECK_THROWS_AS(read((folder.path / "none.jsonl.zst").string()), file_error);
  DOCTEST_CHECK_THROWS_AS(read(folder.write("empty.jsonl", "")), data::record_error);
  DOCTEST_CHECK_THROWS_AS(read(folder.write("empty.jsonl.zst", compressed(""))), data::record_error);
  DOCTEST_CHECK_THROWS_AS(read(folder.write("plain.jsonl.zst", one_of_each)), file_error);
  std::string many;
  for (int i = 0; i < 5000; ++i) many += record(std::to_string(i * 7919), "C4") + "\n";
  auto whole = compressed(many);
  DOCTEST_CHECK(read(folder.write("whole.jsonl.zst", whole)).size() == 5000);
  whole.resize(whole.size() - 5);
  auto const torn = folder.write("torn.jsonl.zst", whole);
  auto const message = "seqmix: zstd: " + torn + " ends inside a compressed frame (an unfinished download?)";
  DOCTEST_CHECK_THROWS_WITH_AS(read(torn), message.c_str(), file_error);
}

DOCTEST_TEST_CASE("lines longer than the read block come whole, a limit on their length holds") {
  scratch const folder;
  std::string const longest(600000, 'x');
  auto const path = folder.write("lines", "a\n" + longest + "\n\nlast");
  data::line_reader lines{data::file_source(path)};
  std::vector<std::string> all;
  for (std::string_view line; lines.next(line);) all.emplace_back(line);
  DOCTEST_CHECK(all == std::vector<std::string>{"a", longest, "", "last"});
  DOCTEST_CHECK(lines.number() == 4);
  data::line_reader limited{data::file_source(path), 1000};
  std::string_view line;
  DOCTEST_CHECK(limited.next(line));
  DOCTEST_CHECK_THROWS_AS(limited.next(line), file_error);
  DOCTEST_CHECK_THROWS_AS(data::file_source(folder.path.string() + "/none"), file_error);
}

DOCTEST_TEST_CASE("decompressed text larger than the reader's blocks comes whole") {
  scratch const folder;
  std::string bytes;
  for (int i = 0; i < 200000; ++i) bytes += std::to_string(i) + (i % 1000 == 0 ? "\n" : " ");
  data::zstd_source source(folder.write("big.zst", compressed(bytes)));
  std::string out;
  std::vector<char> block(1000);
  for (std::size_t got = 0; (got = source.read(block)) > 0;) out.append(block.data(), got);
  DOCTEST_CHECK(out == bytes);
}

}  // namespace
