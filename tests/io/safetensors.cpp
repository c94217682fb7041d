#include <algorithm>
#include <bit>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <iterator>
#include <limits>
#include <map>
#include <random>
#include <sched.h>
#include <span>
#include <string>
#include <string_view>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <system_error>
#include <unistd.h>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <seqmix/io/safetensors.hpp>

namespace {

namespace fs = std::filesystem;
namespace io = seqmix::io;
using io::dtype;
using seqmix::index_t;

/// A folder of its own that is removed with all its files.
struct folder {
  fs::path path;
  folder() {
    auto name = (fs::temp_directory_path() / "seqmix-io-XXXXXX").string();
    DOCTEST_REQUIRE(::mkdtemp(name.data()) != nullptr);
    path = name;
  }
  folder(folder const&) = delete;
  folder& operator=(folder const&) = delete;
  ~folder() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  index_t files() const { return std::distance(fs::directory_iterator(path), fs::directory_iterator()); }
};

std::string text_of(fs::path const& path) {
  auto const bytes = io::detail::read_file(path);
  return {reinterpret_cast<char const*>(bytes.data()), std::size_t(bytes.size())};
}

std::string file_text(std::uint64_t length, std::string_view header, std::string_view data) {
  std::string text(8, '\0');
  std::memcpy(text.data(), &length, 8);
  return text + std::string(header) + std::string(data);
}

std::string file_text(std::string_view header, std::string_view data) {
  return file_text(header.size(), header, data);
}

io::safetensors_file load(std::string_view text) {
  seqmix::buffer<std::byte> bytes{index_t(text.size())};
  if (!text.empty()) std::memcpy(bytes.data(), text.data(), text.size());
  return io::safetensors_file("x.safetensors", std::move(bytes));
}

/// What the error says; empty if the text loads.
std::string complaint(std::string_view text) {
  try {
    load(text);
    return "";
  } catch (seqmix::file_error const& e) {
    return e.what();
  }
}

template <class F>
std::string complaint_of(F&& f) {
  try {
    f();
    return "";
  } catch (seqmix::file_error const& e) {
    return e.what();
  }
}

bool contains(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }

std::string base_header() { return "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}  "; }
std::string const base_data("\x00\x00\x80\x3f\x00\x00\x00\x40", 8);
std::string const scalar_data("\x00\x00\x00\x00\x00\x00\x04\xc0", 8);

/// The base header with one part replaced.
std::string changed(std::string_view from, std::string_view to) {
  auto header = base_header();
  header.replace(header.find(from), from.size(), to);
  return header;
}

}  // namespace

DOCTEST_TEST_CASE("P-K1: the base file loads as a = [1, 2]") {
  auto const text = file_text(base_header(), base_data);
  DOCTEST_REQUIRE(text.size() == 72);
  auto const file = load(text);
  DOCTEST_REQUIRE(file.tensors().size() == 1);
  auto const& a = file.at("a");
  DOCTEST_CHECK(a.type == dtype::f32);
  DOCTEST_CHECK(a.shape == std::vector<index_t>{2});
  DOCTEST_CHECK(a.elements() == 2);
  std::vector<float> values(2);
  file.read("a", std::span(values));
  DOCTEST_CHECK(values == std::vector<float>{1, 2});
  DOCTEST_CHECK(file.metadata().empty());
}

DOCTEST_TEST_CASE("P-K1: every mutation gives one error that names the file and the tensor or field") {
  struct mutation {
    char const* name;
    std::string text;
    std::string says;
  };
  auto const with = [](std::string_view from, std::string_view to) {
    return file_text(changed(from, to), base_data);
  };
  auto const base = file_text(base_header(), base_data);
  std::string const a = "seqmix: load x.safetensors: tensor \"a\": ";
  std::string const header = "seqmix: load x.safetensors: the header ";
  std::string const not_utf8 = "\xc3\x28";
  std::string const shape_overflow = "[4611686018427387904,4611686018427387904]";
  std::vector<mutation> const mutations{
      {"empty file", "", "has 0 bytes, expected at least the 8"},
      {"7 bytes", base.substr(0, 7), "has 7 bytes, expected at least the 8"},
      {"only a length", base.substr(0, 8), header + "length 56 is more than the 0 bytes that follow it"},
      {"length 0", file_text(0, base_header(), base_data), header + "length 0 is below 2"},
      {"length 1", file_text(1, base_header(), base_data), header + "length 1 is below 2"},
      {"length 2^20", file_text(1u << 20, base_header(), base_data),
       header + "length 1048576 is more than the 64 bytes"},
      {"length 65", file_text(65, base_header(), base_data), header + "length 65 is more than the 64 bytes"},
      {"length 100 MB + 1", file_text(100'000'001, base_header(), base_data),
       header + "length 100000001 is above the limit"},
      {"length 2^64-1", file_text(~std::uint64_t(0), base_header(), base_data),
       "is above the limit of 100000000 bytes"},
      {"last byte missing", base.substr(0, 71), a + "data_offsets [0,8] end behind the 7 bytes of data"},
      {"trailing byte", base + "x", "has 9 bytes of data, its tensors end at 8: there are trailing bytes"},
      {"offsets reversed", with("[0,8]", "[8,0]"), a + "data_offsets [8,0] end before they begin"},
      {"offsets too far", with("[0,8]", "[0,12]"), a + "data_offsets [0,12] end behind the 8 bytes of data"},
      {"offsets huge", with("[0,8]", "[0,18446744073709551615]"),
       a + "data_offsets [0,18446744073709551615] end behind"},
      {"shape too large", with("[2]", "[3]"), a + "shape [3] of F32 needs 12 bytes, data_offsets [0,8] have 8"},
      {"one offset", with("[0,8]", "[0]"), a + "data_offsets must have 2 numbers, got 1"},
      {"three offsets", with("[0,8]", "[0,8,8]"), a + "data_offsets must have 2 numbers, got more"},
      {"no dtype", with("\"dtype\":\"F32\",", ""), a + "dtype is missing"},
      {"no shape", with("\"shape\":[2],", ""), a + "shape is missing"},
      {"no data_offsets", with(",\"data_offsets\":[0,8]", ""), a + "data_offsets is missing"},
      {"empty tensor object", file_text("{\"a\":{}}", ""), a + "dtype is missing"},
      {"not JSON", file_text("{nonsense", base_data), header + "is not JSON at its byte 3"},
      {"cut JSON", file_text(base_header().substr(0, 50), base_data), header + "is not JSON at its byte 51"},
      {"text after the object", file_text(base_header() + "{}", base_data), header + "is not JSON at its byte"},
      {"zero byte and more", file_text(base_header() + std::string("\0{", 2), base_data),
       header + "is not JSON at its byte 57"},
      {"an array", file_text("[1,2]", ""), header + "is not a JSON object"},
      {"space first", file_text(" " + base_header(), base_data), header + "is not a JSON object"},
      {"not UTF-8", with("\"a\"", "\"" + not_utf8 + "\""), header + "is not UTF-8 at its byte 3"},
      {"cut UTF-8 at the end", file_text("{}\xe2\x82", ""), header + "is not UTF-8 at its byte 3"},
      {"overlong UTF-8", with("\"a\"", "\"\xc0\xaf\""), header + "is not UTF-8 at its byte 3"},
      {"surrogate UTF-8", with("\"a\"", "\"\xed\xa0\x80\""), header + "is not UTF-8 at its byte 3"},
      {"dtype F33", with("F32", "F33"), a + "dtype must be one of F32, F64, BF16, F16, I32, I64, U8, got \"F33\""},
      {"dtype a number", with("\"F32\"", "32"), a + "dtype must be a string, got 32"},
      {"dtype null", with("\"F32\"", "null"), a + "dtype must be a string, got null"},
      {"negative shape", with("[2]", "[-2]"), a + "shape must be unsigned integers below 2^63, got -2"},
      {"fractional shape", with("[2]", "[2.5]"), a + "shape must be unsigned integers below 2^63, got 2.5"},
      {"shape 2^63", with("[2]", "[9223372036854775808]"), a + "shape must be unsigned integers below 2^63"},
      {"shape is a number", with("[2]", "2"), a + "shape must be an array of unsigned integers, got 2"},
      {"shape holds an array", with("[2]", "[[2]]"),
       a + "shape must be unsigned integers below 2^63, got an array"},
      {"shape overflows", with("[2]", shape_overflow), a + "shape " + shape_overflow + " of F32 overflows"},
      {"shape overflows to the right bytes", with("[2]", "[4611686018427387904,4,2]"), "overflows"},
      {"shape overflows beside a 0", with("[2]", "[0,4611686018427387904,4]"), "overflows"},
      {"offset negative", with("[0,8]", "[-8,0]"), a + "data_offsets must be two unsigned integers, got -8"},
      {"offset a float", with("[0,8]", "[0.0,8]"), a + "data_offsets must be two unsigned integers, got 0.0"},
      {"offset above 2^64", with("[0,8]", "[0,18446744073709551616]"),
       a + "data_offsets must be two unsigned integers"},
      {"offset a string", with("[0,8]", "[\"0\",8]"),
       a + "data_offsets must be two unsigned integers, got the string \"0\""},
      {"offsets an object", with("[0,8]", "{}"),
       a + "data_offsets must be an array of unsigned integers, got an object"},
      {"unknown field", with("\"shape\"", "\"sharp\""), a + "\"sharp\" is not a field of the format"},
      {"field twice", with("\"shape\":[2]", "\"shape\":[2],\"shape\":[2]"), a + "shape is there twice"},
      {"tensor is a number", file_text("{\"a\":1}", ""), "tensor \"a\" must be an object, got 1"},
      {"tensor is an array", file_text("{\"a\":[]}", ""), "tensor \"a\" must be an object, got an array"},
      {"number beside a tensor",
       file_text("{\"a\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]},\"b\":true}", "x"),
       "tensor \"b\" must be an object, got true"},
      {"metadata is a string", file_text("{\"__metadata__\":\"x\"}", ""), "__metadata__ must be an object"},
      {"metadata of numbers", file_text("{\"__metadata__\":{\"k\":1}}", ""),
       "__metadata__ \"k\" must be a string, got 1"},
      {"metadata twice", file_text("{\"__metadata__\":{},\"__metadata__\":{}}", ""), "__metadata__ is there twice"},
      {"metadata key twice", file_text("{\"__metadata__\":{\"k\":\"\",\"k\":\"\"}}", ""),
       "__metadata__ \"k\" is there twice"},
  };
  for (auto const& m : mutations) {
    auto const text = complaint(m.text);
    DOCTEST_INFO(std::string(m.name) << ": " << text);
    DOCTEST_CHECK(contains(text, m.says));
    DOCTEST_CHECK(text.starts_with("seqmix: load x.safetensors: "));
    DOCTEST_CHECK(text.size() < 250);
    DOCTEST_CHECK(!contains(text, "\n"));
  }
}

DOCTEST_TEST_CASE("P-K1: two tensors must not overlap, leave a gap or share a name") {
  auto const two = [](std::string_view b_name, std::string_view b_offsets, std::size_t data) {
    auto const header = "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},\"" + std::string(b_name) +
                        "\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" + std::string(b_offsets) + "}}";
    return complaint(file_text(header, std::string(data, 'x')));
  };
  DOCTEST_CHECK(two("b", "[4,8]", 8).empty());
  DOCTEST_CHECK(contains(two("b", "[3,7]", 7), "tensor \"b\": data_offsets begin at 3, expected 4: it overlaps"));
  DOCTEST_CHECK(contains(two("b", "[0,4]", 4), "data_offsets begin at 0, expected 4: it overlaps"));
  DOCTEST_CHECK(
      contains(two("b", "[5,9]", 9), "tensor \"b\": data_offsets begin at 5, expected 4: there is a gap"));
  DOCTEST_CHECK(contains(two("a", "[4,8]", 8), "tensor \"a\" is there twice"));
  DOCTEST_CHECK(contains(two("\\u0061", "[4,8]", 8), "tensor \"a\" is there twice"));
  DOCTEST_CHECK(contains(complaint(file_text(changed("[0,8]", "[4,8]"), base_data)), "have 4"));
  DOCTEST_CHECK(contains(complaint(file_text("{}", "x")), "trailing bytes"));
  DOCTEST_CHECK(complaint(file_text("{}", "")).empty());
}

DOCTEST_TEST_CASE("P-K1: a shape may have 64 axes and no more") {
  auto const with_axes = [](int axes) {
    std::string shape = "[2";
    for (int i = 1; i < axes; ++i) shape += ",1";
    return complaint(file_text(changed("[2]", shape + "]"), base_data));
  };
  DOCTEST_CHECK(with_axes(64).empty());
  DOCTEST_CHECK(contains(with_axes(65), "tensor \"a\": shape has more than 64 axes"));
}

DOCTEST_TEST_CASE("P-K1: deep nesting, long and strange names give one short line") {
  DOCTEST_CHECK(contains(complaint(file_text("{\"a\":" + std::string(1'000'000, '['), "")), "must be an object"));
  auto const text = complaint(file_text("{\"" + std::string(100'000, 'n') + "\\n\":1}", ""));
  DOCTEST_CHECK(contains(text, "nnn...\" must be an object"));
  DOCTEST_CHECK(text.size() < 400);
  DOCTEST_CHECK(
      contains(complaint(file_text("{\"line\\nbreak\":1}", "")), "tensor \"line\\nbreak\" must be an object"));
}

DOCTEST_TEST_CASE("P-K1: a path that is no readable regular file is an error naming it") {
  folder const here;
  auto const loading = [](fs::path const& path) { return complaint_of([&] { io::safetensors_file file(path); }); };
  auto const missing = (here.path / "missing").string();
  DOCTEST_CHECK(loading(missing) == "seqmix: read " + missing + ": cannot be opened: No such file or directory");
  DOCTEST_CHECK(contains(loading(here.path), "is not a regular file"));
  DOCTEST_CHECK(contains(loading("/dev/zero"), "is not a regular file"));
  DOCTEST_REQUIRE(::mkfifo((here.path / "pipe").c_str(), 0600) == 0);
  DOCTEST_CHECK(contains(loading(here.path / "pipe"), "is not a regular file"));
}

DOCTEST_TEST_CASE("P-K1: a few thousand random mutations load or throw file_error") {
  std::vector<std::byte> bytes(24);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = std::byte(i);
  auto const all = std::span<std::byte const>(bytes);
  std::vector<io::safetensor> const tensors{{"layer.0.weight", dtype::f32, {2, 2}, all.first(16)},
                                            {"\xc3\xa9", dtype::bf16, {}, all.subspan(16, 2)},
                                            {"empty", dtype::i64, {0, 3}, {}},
                                            {"bytes", dtype::u8, {6}, all.subspan(18)}};
  folder const here;
  io::write_safetensors(here.path / "f", tensors, {{"step", "12"}});
  auto const valid = text_of(here.path / "f");
  DOCTEST_REQUIRE(complaint(valid).empty());

  std::mt19937 random(20240611);
  auto const below = [&](std::size_t n) { return std::size_t(random() % n); };
  std::string_view const alphabet = "{}[]\",:0123456789-.eE \\u\x00\x80\xff";
  int loaded = 0, refused = 0, changed_loads = 0;
  unsigned sum = 0;
  for (int round = 0; round < 6000; ++round) {
    auto text = valid;
    auto const edits = 1 + below(3);
    for (std::size_t edit = 0; edit < edits && !text.empty(); ++edit) {
      auto const at = below(2) == 0 ? below(text.size()) : below(std::min(text.size(), std::size_t(300)));
      switch (below(6)) {
      case 0:
        text[at] = char(text[at] ^ char(1 << below(8)));
        break;
      case 1:
        text[at] = char(random() & 0xff);
        break;
      case 2:
        text[at] = alphabet[below(alphabet.size())];
        break;
      case 3:
        text.resize(at);
        break;
      case 4:
        text.erase(at, 1 + below(8));
        break;
      default:
        text.insert(at, 1 + below(4), alphabet[below(alphabet.size())]);
        break;
      }
    }
    // Half of the files get their true header length back, so that the mutations reach the JSON.
    if (text.size() > 40 && below(2) == 0) {
      std::uint64_t const length = text.size() - 8 - 24;
      std::memcpy(text.data(), &length, 8);
    }
    try {
      auto const file = load(text);
      ++loaded;
      changed_loads += text != valid;
      for (auto const& tensor : file.tensors())
        for (auto byte : tensor.bytes) sum += unsigned(byte);
    } catch (seqmix::file_error const&) {
      ++refused;
    }
  }
  DOCTEST_CHECK(loaded + refused == 6000);
  DOCTEST_CHECK(changed_loads > 50);
  DOCTEST_CHECK(refused > 3000);
  DOCTEST_CHECK(sum > 0);
}

DOCTEST_TEST_CASE("P-K2: header is padded to a multiple of 64 and a loaded file saves to the same bytes") {
  folder const here;
  auto const path = here.path / "f.safetensors";
  std::vector<float> const values{1, 2, 3};
  for (std::size_t length = 1; length <= 80; ++length) {
    DOCTEST_CAPTURE(length);
    std::vector<io::safetensor> const tensors{io::as_safetensor(std::string(length, 'n'), {3}, std::span(values))};
    std::map<std::string, std::string> const metadata{{"b", "2"}, {"a", std::string(length % 3, '"')}};
    io::write_safetensors(path, tensors, metadata);
    auto const text = text_of(path);
    std::uint64_t header = 0;
    std::memcpy(&header, text.data(), 8);
    DOCTEST_CHECK((8 + header) % 64 == 0);
    DOCTEST_CHECK(text.size() == 8 + header + 12);
    DOCTEST_CHECK((text[7 + header] == ' ' || text[7 + header] == '}'));

    io::safetensors_file const file(path);
    DOCTEST_CHECK(reinterpret_cast<std::uintptr_t>(file.tensors()[0].bytes.data()) % 64 == 0);
    DOCTEST_CHECK(file.metadata() == metadata);
    io::write_safetensors(here.path / "again", file.tensors(), file.metadata());
    DOCTEST_CHECK(text_of(here.path / "again") == text);
    io::write_safetensors(path, file.tensors(), file.metadata());
    DOCTEST_CHECK(text_of(path) == text);
  }
}

DOCTEST_TEST_CASE("P-K2: the base file of P-K1 is what the writer writes, byte by byte") {
  folder const here;
  std::vector<float> const values{1, 2};
  std::vector<io::safetensor> const tensors{io::as_safetensor("a", {2}, std::span(values))};
  io::write_safetensors(here.path / "f", tensors);
  DOCTEST_CHECK(text_of(here.path / "f") == file_text(base_header(), base_data));
}

DOCTEST_TEST_CASE("P-K2: a file of another writer whose header is not padded reads, unaligned data too") {
  auto const file = load(file_text(changed("  ", " "), base_data));
  DOCTEST_CHECK(reinterpret_cast<std::uintptr_t>(file.at("a").bytes.data()) % 4 != 0);
  std::vector<float> values(2);
  file.read("a", std::span(values));
  DOCTEST_CHECK(values == std::vector<float>{1, 2});
}

DOCTEST_TEST_CASE("P-K3: scalars and empty tensors load and survive a round trip") {
  std::string header = "{\"s\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[0,8]},"
                       "\"z\":{\"dtype\":\"F32\",\"shape\":[0,4],\"data_offsets\":[8,8]}}";
  header.resize(112, ' ');
  auto const text = file_text(header, scalar_data);
  DOCTEST_REQUIRE(text.size() == 128);
  auto const check = [](io::safetensors_file const& file) {
    DOCTEST_REQUIRE(file.tensors().size() == 2);
    DOCTEST_CHECK(file.at("s").shape.empty());
    DOCTEST_CHECK(file.at("s").elements() == 1);
    double value = 0;
    file.read("s", std::span(&value, 1));
    DOCTEST_CHECK(value == -2.5);
    DOCTEST_CHECK(file.at("z").shape == std::vector<index_t>{0, 4});
    DOCTEST_CHECK(file.at("z").bytes.empty());
    file.read("z", std::span<float>());
  };
  auto const file = load(text);
  check(file);
  folder const here;
  io::write_safetensors(here.path / "f", file.tensors(), file.metadata());
  check(io::safetensors_file(here.path / "f"));
}

DOCTEST_TEST_CASE("P-K3: BF16 bit patterns pass through unchanged") {
  std::vector<std::uint16_t> const bits{0x3f80, 0xc020, 0x4049};
  folder const here;
  std::vector<io::safetensor> const tensors{{"b", dtype::bf16, {3}, std::as_bytes(std::span(bits))},
                                            {"h", dtype::f16, {1, 3}, std::as_bytes(std::span(bits))}};
  io::write_safetensors(here.path / "f", tensors);
  io::safetensors_file const file(here.path / "f");
  DOCTEST_CHECK(file.at("b").type == dtype::bf16);
  DOCTEST_CHECK(file.at("h").type == dtype::f16);
  std::vector<float> const expected{1.0f, -2.5f, 3.140625f};
  for (std::size_t i = 0; i < 3; ++i) {
    std::uint16_t pattern = 0;
    std::memcpy(&pattern, file.at("b").bytes.data() + 2 * i, 2);
    DOCTEST_CHECK(pattern == bits[i]);
    DOCTEST_CHECK(std::bit_cast<float>(std::uint32_t(pattern) << 16) == expected[i]);
  }
  DOCTEST_CHECK(contains(complaint_of([&] {
                           std::vector<float> values(3);
                           file.read("b", std::span(values));
                         }),
                         "tensor \"b\": expected F32, got BF16"));
}

DOCTEST_TEST_CASE("safetensors: every element type keeps all its bits, order and metadata stay") {
  auto const nan = std::bit_cast<float>(0x7fc12345u);
  std::vector<float> const f{nan, -0.0f, std::numeric_limits<float>::denorm_min(), 1e30f};
  std::vector<double> const d{0.1, -std::numeric_limits<double>::infinity()};
  std::vector<std::int32_t> const i{std::numeric_limits<std::int32_t>::min(), 7};
  std::vector<std::int64_t> const l{std::numeric_limits<std::int64_t>::max()};
  std::vector<std::uint8_t> const u{0, 255, 1};
  std::vector<io::safetensor> const tensors{io::as_safetensor("z.float", {2, 2}, std::span(f)),
                                            io::as_safetensor("a.double", {2}, std::span(d)),
                                            io::as_safetensor("odd bytes", {3, 1}, std::span(u)),
                                            io::as_safetensor("m \"q\" \\ \n", {2}, std::span(i)),
                                            io::as_safetensor("\xe2\x82\xac", {1, 1, 1}, std::span(l)),
                                            io::as_safetensor("", {1}, std::span(d).first(1))};
  folder const here;
  io::write_safetensors(here.path / "f", tensors, {{"variant", "gla"}, {"note", "\xe2\x82\xac \n\""}});
  auto loaded = io::safetensors_file(here.path / "f");
  auto const file = std::move(loaded);
  DOCTEST_CHECK(file.metadata() ==
                std::map<std::string, std::string>{{"note", "\xe2\x82\xac \n\""}, {"variant", "gla"}});
  DOCTEST_REQUIRE(file.tensors().size() == tensors.size());
  for (std::size_t k = 0; k < tensors.size(); ++k) {
    auto const& got = file.tensors()[k];
    DOCTEST_CHECK(got.name == tensors[k].name);
    DOCTEST_CHECK(got.type == tensors[k].type);
    DOCTEST_CHECK(got.shape == tensors[k].shape);
    DOCTEST_CHECK(std::ranges::equal(got.bytes, tensors[k].bytes));
    DOCTEST_CHECK(file.find(got.name) == &got);
  }
  std::vector<std::int64_t> back(1);
  file.read("\xe2\x82\xac", std::span(back));
  DOCTEST_CHECK(back == l);
}

DOCTEST_TEST_CASE("safetensors: a wrong name, type or size is an error naming tensor, expected and actual") {
  auto const file = load(file_text(base_header(), base_data));
  std::vector<float> three(3, 9.0f);
  std::vector<double> two(2);
  DOCTEST_CHECK(file.find("b") == nullptr);
  DOCTEST_CHECK_THROWS_WITH_AS(file.at("b"), "seqmix: load x.safetensors: there is no tensor \"b\"",
                               seqmix::file_error);
  DOCTEST_CHECK_THROWS_WITH_AS(file.read("a", std::span(two)),
                               "seqmix: load x.safetensors: tensor \"a\": expected F64, got F32",
                               seqmix::file_error);
  DOCTEST_CHECK_THROWS_WITH_AS(
      file.read("a", std::span(three)),
      "seqmix: load x.safetensors: tensor \"a\": expected 3 elements, got shape [2] with 2", seqmix::file_error);
  DOCTEST_CHECK(three == std::vector<float>(3, 9.0f));
}

DOCTEST_TEST_CASE("safetensors: the writer refuses what a reader would refuse and leaves the earlier file") {
  folder const here;
  auto const path = here.path / "f";
  std::vector<float> const values{1, 2};
  auto const good = io::as_safetensor("a", {2}, std::span(values));
  io::write_safetensors(path, std::vector{good});
  auto const earlier = text_of(path);
  auto const writing = [&](std::vector<io::safetensor> const& tensors,
                           std::map<std::string, std::string> const& metadata = {}) {
    return complaint_of([&] { io::write_safetensors(path, tensors, metadata); });
  };
  auto const with_shape = [&](std::vector<index_t> shape) {
    return writing({io::as_safetensor("a", std::move(shape), std::span(values))});
  };
  DOCTEST_CHECK(contains(with_shape({3}), "tensor \"a\": shape [3] of F32 needs 12 bytes, got 8"));
  DOCTEST_CHECK(contains(with_shape({-2}), "tensor \"a\": shape [-2] of F32 has a negative extent or overflows"));
  DOCTEST_CHECK(contains(with_shape({-1, -2}), "has a negative extent"));
  DOCTEST_CHECK(contains(with_shape({index_t(1) << 62, 4, 2}), "overflows"));
  DOCTEST_CHECK(contains(with_shape(std::vector<index_t>(65, 1)), "has more than 64 axes"));
  DOCTEST_CHECK(contains(writing({good, good}), "tensor \"a\" is there twice"));
  DOCTEST_CHECK(
      contains(writing({io::as_safetensor("__metadata__", {2}, std::span(values))}), "keeps for metadata"));
  DOCTEST_CHECK(contains(writing({io::as_safetensor("\xff", {2}, std::span(values))}), "is not UTF-8"));
  DOCTEST_CHECK(contains(writing({good}, {{"k", "\xff"}}), "metadata value"));
  DOCTEST_CHECK(contains(writing({good}, {{"\xff", "v"}}), "metadata key"));
  DOCTEST_CHECK(text_of(path) == earlier);
  DOCTEST_CHECK(here.files() == 1);
}

DOCTEST_TEST_CASE("atomic file: the pieces replace the earlier file and nothing else is left") {
  folder const here;
  auto const path = here.path / "f";
  io::write_file_atomically(path, "earlier");
  DOCTEST_REQUIRE(::chmod(path.c_str(), 0640) == 0);
  std::string const one = "one ", two = "two";
  std::vector<std::span<std::byte const>> const pieces{
      std::as_bytes(std::span(one)), {}, std::as_bytes(std::span(two))};
  io::write_file_atomically(path, pieces);
  DOCTEST_CHECK(text_of(path) == "one two");
  DOCTEST_CHECK(fs::status(path).permissions() == fs::perms(0640));
  DOCTEST_CHECK(here.files() == 1);
  fs::create_symlink("f", here.path / "link");
  io::write_file_atomically(here.path / "link", "through");
  DOCTEST_CHECK(fs::is_symlink(here.path / "link"));
  DOCTEST_CHECK(text_of(path) == "through");
  DOCTEST_CHECK(here.files() == 2);
}

DOCTEST_TEST_CASE("atomic file: a missing folder, a folder or a device in its place is an error naming the path") {
  folder const here;
  auto const writing = [](fs::path const& path) {
    return complaint_of([&] { io::write_file_atomically(path, "x"); });
  };
  auto const missing = (here.path / "no" / "f").string();
  DOCTEST_CHECK(writing(missing) ==
                "seqmix: write " + missing + ": its folder cannot be opened: No such file or directory");
  DOCTEST_CHECK(contains(writing(here.path), "is there already and not a regular file"));
  DOCTEST_CHECK(contains(writing("/dev/full"), "seqmix: write /dev/full: is there already and not a regular file"));
  io::write_file_atomically(here.path / "f", "earlier");
  DOCTEST_CHECK(contains(writing(here.path / "f" / "g"), "Not a directory"));
  fs::create_symlink("nowhere", here.path / "link");
  DOCTEST_CHECK(contains(writing(here.path / "link"), "its symbolic link leads nowhere"));
  DOCTEST_CHECK(here.files() == 2);
}

DOCTEST_TEST_CASE("atomic file: an unwritable folder is an error and the earlier file stays") {
  folder const here;
  auto const path = here.path / "f";
  io::write_file_atomically(path, "earlier");
  DOCTEST_REQUIRE(::chmod(path.c_str(), 0666) == 0);
  DOCTEST_REQUIRE(::chmod(here.path.c_str(), 0555) == 0);
  bool const root = ::geteuid() == 0;  // root may write anywhere
  if (root) DOCTEST_REQUIRE(::seteuid(65534) == 0);
  auto const text = complaint_of([&] { io::write_file_atomically(path, "later"); });
  if (root) DOCTEST_REQUIRE(::seteuid(0) == 0);
  DOCTEST_REQUIRE(::chmod(here.path.c_str(), 0755) == 0);
  DOCTEST_CHECK(text ==
                "seqmix: write " + path.string() + ": no file can be created in its folder: Permission denied");
  DOCTEST_CHECK(text_of(path) == "earlier");
  DOCTEST_CHECK(here.files() == 1);
}

DOCTEST_TEST_CASE("atomic file: a write-protected file is not replaced") {
  folder const here;
  auto const path = here.path / "f";
  io::write_file_atomically(path, "earlier");
  bool const root = ::geteuid() == 0;
  if (root) DOCTEST_REQUIRE(::chown(here.path.c_str(), 65534, gid_t(-1)) == 0);
  DOCTEST_REQUIRE(::chmod(path.c_str(), 0444) == 0);
  // access() asks for the real user, so the effective one is not enough: a child takes both.
  auto const child = ::fork();
  if (child == 0) {
    if (root && ::setuid(65534) != 0) ::_exit(2);
    auto const text = complaint_of([&] { io::write_file_atomically(path, "later"); });
    ::_exit(contains(text, "cannot be replaced: Permission denied") ? 0 : 1);
  }
  int status = -1;
  DOCTEST_REQUIRE(::waitpid(child, &status, 0) == child);
  DOCTEST_CHECK(status == 0);
  DOCTEST_CHECK(text_of(path) == "earlier");
  DOCTEST_CHECK(here.files() == 1);
}

DOCTEST_TEST_CASE("disk full: a full device gives the system's reason and the bytes that were taken") {
  auto const file = io::detail::open_file("/dev/full", O_WRONLY);
  DOCTEST_REQUIRE(bool(file));
  std::string const text = "some bytes";
  std::size_t done = 0;
  DOCTEST_CHECK(io::detail::write_all(file.get(), std::as_bytes(std::span(text)), done) == ENOSPC);
  DOCTEST_CHECK(done == 0);
}

DOCTEST_TEST_CASE(
    "disk full: a limit on the file size stops the write, the earlier file stays, no temporary is left") {
  folder const here;
  auto const path = here.path / "f";
  std::vector<float> const small(4, 1.0f), large(100'000, 2.0f);
  io::write_safetensors(path, std::vector{io::as_safetensor("a", {4}, std::span(small))});
  auto const earlier = text_of(path);

  auto const before = std::signal(SIGXFSZ, SIG_IGN);
  rlimit old{};
  DOCTEST_REQUIRE(::getrlimit(RLIMIT_FSIZE, &old) == 0);
  rlimit const low{4096, old.rlim_max};
  DOCTEST_REQUIRE(::setrlimit(RLIMIT_FSIZE, &low) == 0);
  auto const text = complaint_of(
      [&] { io::write_safetensors(path, std::vector{io::as_safetensor("a", {100'000}, std::span(large))}); });
  DOCTEST_REQUIRE(::setrlimit(RLIMIT_FSIZE, &old) == 0);
  std::signal(SIGXFSZ, before);

  DOCTEST_CHECK(text == "seqmix: write " + path.string() + ": failed after 4096 of 400128 bytes: File too large");
  DOCTEST_CHECK(text_of(path) == earlier);
  DOCTEST_CHECK(here.files() == 1);
}

DOCTEST_TEST_CASE("disk full: on a small file system the earlier file stays and no temporary is left") {
  folder const here;
  std::vector<float> const small(4, 1.0f), large(100'000, 2.0f);
  auto const path = here.path / "f";
  // A child with mounts of its own, so that nothing outside can see or keep the file system.
  auto const child = ::fork();
  if (child == 0) {
    if (::unshare(CLONE_NEWNS) != 0 || ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", here.path.c_str(), "tmpfs", 0, "size=64k") != 0)
      ::_exit(77);
    try {
      io::write_safetensors(path, std::vector{io::as_safetensor("a", {4}, std::span(small))});
      auto const earlier = text_of(path);
      auto const text = complaint_of(
          [&] { io::write_safetensors(path, std::vector{io::as_safetensor("a", {100'000}, std::span(large))}); });
      bool const good = text.starts_with("seqmix: write " + path.string() + ": failed after ") &&
                        text.ends_with(" of 400128 bytes: No space left on device") && text_of(path) == earlier &&
                        here.files() == 1;
      ::_exit(good ? 0 : 1);
    } catch (...) {
      ::_exit(2);
    }
  }
  int status = -1;
  DOCTEST_REQUIRE(::waitpid(child, &status, 0) == child);
  DOCTEST_REQUIRE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 77)
    DOCTEST_MESSAGE("no permission to mount a small file system: only the size limit was tested");
  else
    DOCTEST_CHECK(WEXITSTATUS(status) == 0);
}
