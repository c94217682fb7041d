#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <limits>
#include <string>
#include <string_view>
#include <sys/resource.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <seqmix/io/json_lines.hpp>

namespace {

namespace fs = std::filesystem;
namespace io = seqmix::io;
using nlohmann::json;

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
  std::ptrdiff_t files() const { return std::distance(fs::directory_iterator(path), fs::directory_iterator()); }
};

std::string text_of(fs::path const& path) {
  auto const bytes = io::detail::read_file(path);
  return {reinterpret_cast<char const*>(bytes.data()), std::size_t(bytes.size())};
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

json line(int step) { return {{"step", step}, {"loss", 1.0 / (1 + step)}}; }

std::vector<int> steps_of(fs::path const& path) {
  std::vector<int> steps;
  for (auto const& value : io::read_json_lines(path)) steps.push_back(value.at("step").get<int>());
  return steps;
}

}  // namespace

DOCTEST_TEST_CASE("json lines: what is appended is in the file at once and reads back with all bits") {
  folder const here;
  auto const path = here.path / "log.jsonl";
  io::json_lines_log log(path);
  DOCTEST_CHECK(text_of(path).empty());
  std::vector<json> const values{{{"step", 1}, {"loss", 0.1}},
                                 {{"step", 2}, {"loss", std::nextafter(0.1, 1.0)}, {"text", "a\nb \xe2\x82\xac"}},
                                 {{"loss", std::numeric_limits<double>::denorm_min()}}};
  for (std::size_t i = 0; i < values.size(); ++i) {
    log.append(values[i]);
    auto const read = io::read_json_lines(path);
    DOCTEST_REQUIRE(read.size() == i + 1);
    DOCTEST_CHECK(read == std::vector<json>(values.begin(), values.begin() + std::ptrdiff_t(i) + 1));
  }
  log.sync();
  auto moved = std::move(log);
  moved.append(line(4));
  DOCTEST_CHECK(io::read_json_lines(path).size() == 4);
}

DOCTEST_TEST_CASE("json lines: NaN becomes null") {
  folder const here;
  io::json_lines_log log(here.path / "log");
  log.append({{"loss", std::numeric_limits<double>::quiet_NaN()}});
  DOCTEST_CHECK(text_of(log.path()) == "{\"loss\":null}\n");
}

DOCTEST_TEST_CASE("json lines: a log that is opened again goes on") {
  folder const here;
  auto const path = here.path / "log";
  io::json_lines_log(path).append(line(1));
  io::json_lines_log(path).append(line(2));
  DOCTEST_CHECK(steps_of(path) == std::vector<int>{1, 2});
}

DOCTEST_TEST_CASE("json lines: a run that is cut after any byte and resumed holds each step once") {
  folder const here;
  auto const path = here.path / "log";
  {
    io::json_lines_log log(path);
    for (int step = 1; step <= 6; ++step) log.append(line(step));
  }
  auto const whole = text_of(path);
  for (std::size_t cut = 0; cut <= whole.size(); ++cut) {
    DOCTEST_CAPTURE(cut);
    io::write_file_atomically(path, std::string_view(whole).substr(0, cut));
    int const complete = int(std::count(whole.begin(), whole.begin() + std::ptrdiff_t(cut), '\n'));
    for (int saved : {0, complete / 2, complete}) {  // the checkpoint to resume from
      io::json_lines_log log(path);
      log.truncate_after(saved);
      for (int step = saved + 1; step <= 6; ++step) log.append(line(step));
      DOCTEST_CHECK(text_of(path) == whole);
    }
  }
  DOCTEST_CHECK(here.files() == 1);
}

DOCTEST_TEST_CASE("json lines: truncation keeps lines byte by byte and those without a step") {
  folder const here;
  auto const path = here.path / "log";
  std::string const kept = "{ \"run\" : 1.50 }\n[1]\n{\"step\":3.0}\n{\"step\":\"x\"}\n{\"step\":-1}\n";
  io::write_file_atomically(path, kept + "{\"step\":4}\n{\"step\":3.5}\n{\"step\":9000000000000000000}\n");
  io::json_lines_log log(path);
  log.truncate_after(3);
  DOCTEST_CHECK(text_of(path) == kept);
  log.append(line(4));
  DOCTEST_CHECK(text_of(path) == kept + line(4).dump() + "\n");
}

DOCTEST_TEST_CASE("json lines: a log with nothing to drop is not rewritten") {
  folder const here;
  auto const path = here.path / "log";
  io::json_lines_log log(path);
  log.append(line(1));
  struct stat before {
  }, after{};
  DOCTEST_REQUIRE(::stat(path.c_str(), &before) == 0);
  log.truncate_after(1);
  DOCTEST_REQUIRE(::stat(path.c_str(), &after) == 0);
  DOCTEST_CHECK(before.st_ino == after.st_ino);
  log.keep_if([](json const&) { return false; });
  DOCTEST_CHECK(text_of(path).empty());
}

DOCTEST_TEST_CASE("json lines: only the last line may be torn, another bad line is named by its number") {
  folder const here;
  auto const path = here.path / "log";
  auto const reading = [&](std::string_view text) {
    io::write_file_atomically(path, text);
    return complaint_of([&] { (void)io::read_json_lines(path); });
  };
  auto const start = "seqmix: read " + path.string() + ": line ";
  for (std::string_view torn : {"{\"step\":2", "{\"step\":2}", "{\"step\":2\n", "\n"}) {
    DOCTEST_CHECK(reading("{\"step\":1}\n" + std::string(torn)).empty());
    DOCTEST_CHECK(steps_of(path) == std::vector<int>{1});
    io::json_lines_log(path).truncate_after(5);
    DOCTEST_CHECK(text_of(path) == "{\"step\":1}\n");
  }
  DOCTEST_CHECK(reading("{\"step\":1}\n" + std::string(50, '\0')).empty());
  DOCTEST_CHECK(reading("").empty());
  DOCTEST_CHECK(reading("{\"step\":1}\n{\"st\n{\"step\":3}\n") == start + "2 is not JSON");
  DOCTEST_CHECK(reading("{\"step\":1}\n\n{\"step\":3}\n") == start + "2 is not JSON");
  DOCTEST_CHECK(reading("{\"step\":1}{\"step\":2}\n{\"step\":3}\n") == start + "1 is not JSON");
  DOCTEST_CHECK(reading(std::string("{\"step\":1}\0x\n{\"step\":3}\n", 24)) == start + "1 is not JSON");
  DOCTEST_CHECK(reading("{\"a\":\"\xff\"}\n{\"step\":3}\n") == start + "1 is not JSON");

  io::write_file_atomically(path, "bad\n{\"step\":9}\n");
  DOCTEST_CHECK(complaint_of([&] { io::json_lines_log(path).truncate_after(1); }) == start + "1 is not JSON");
  DOCTEST_CHECK(text_of(path) == "bad\n{\"step\":9}\n");
}

DOCTEST_TEST_CASE("json lines: nothing is appended to a torn line") {
  folder const here;
  auto const path = here.path / "log";
  io::write_file_atomically(path, "{\"step\":1}\n{\"st");
  io::json_lines_log log(path);
  DOCTEST_CHECK(complaint_of([&] { log.append(line(2)); }) ==
                "seqmix: append to " + path.string() +
                    ": its last line is torn; call keep_if or truncate_after first");
  DOCTEST_CHECK(text_of(path) == "{\"step\":1}\n{\"st");
  log.truncate_after(1);
  log.append(line(2));
  DOCTEST_CHECK(steps_of(path) == std::vector<int>{1, 2});
}

DOCTEST_TEST_CASE("json lines: a path that cannot be written or read is an error naming it") {
  folder const here;
  auto const opening = [](fs::path const& path) { return complaint_of([&] { io::json_lines_log log(path); }); };
  auto const missing = (here.path / "no" / "log").string();
  DOCTEST_CHECK(opening(missing) ==
                "seqmix: open " + missing + ": cannot be opened or created: No such file or directory");
  DOCTEST_CHECK(opening(here.path) ==
                "seqmix: open " + here.path.string() + ": cannot be opened or created: Is a directory");
  DOCTEST_CHECK(complaint_of([&] { (void)io::read_json_lines(missing); }) ==
                "seqmix: read " + missing + ": cannot be opened: No such file or directory");
}

DOCTEST_TEST_CASE("json lines: a string that is not UTF-8 is refused and nothing is written") {
  folder const here;
  io::json_lines_log log(here.path / "log");
  DOCTEST_CHECK_THROWS_AS(log.append({{"text", "\xff"}}), seqmix::value_error);
  DOCTEST_CHECK(text_of(log.path()).empty());
}

DOCTEST_TEST_CASE("json lines: a full disk is an error with the system's reason and bytes") {
  io::json_lines_log log("/dev/full");
  DOCTEST_CHECK(complaint_of([&] {
                  log.append({{"step", 1}});
                }) == "seqmix: append to /dev/full: failed after 0 of 11 bytes: No space left on device");
  log.sync();
}

DOCTEST_TEST_CASE("json lines: a line that fits only in part is taken back and the log goes on") {
  folder const here;
  auto const path = here.path / "log";
  io::json_lines_log log(path);
  log.append(line(1));
  auto const earlier = text_of(path);

  auto const before = std::signal(SIGXFSZ, SIG_IGN);
  rlimit old{};
  DOCTEST_REQUIRE(::getrlimit(RLIMIT_FSIZE, &old) == 0);
  rlimit const low{earlier.size() + 5, old.rlim_max};
  DOCTEST_REQUIRE(::setrlimit(RLIMIT_FSIZE, &low) == 0);
  auto const text = complaint_of([&] { log.append(line(2)); });
  auto const rest = text_of(path);
  DOCTEST_REQUIRE(::setrlimit(RLIMIT_FSIZE, &old) == 0);
  std::signal(SIGXFSZ, before);

  DOCTEST_CHECK(text == "seqmix: append to " + path.string() + ": failed after 5 of " +
                            std::to_string(line(2).dump().size() + 1) + " bytes: File too large");
  DOCTEST_CHECK(rest == earlier);
  log.append(line(2));
  DOCTEST_CHECK(steps_of(path) == std::vector<int>{1, 2});
}
