/// Turns fetched packages, folders of text or SlimPajama files into the text of a limited-domain study:
/// OUT/<domain>/{train,validation,test}.txt and OUT/domains.json, which says what each domain is and comes from.

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>
#include <zlib.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <seqmix/data/clean_text.hpp>
#include <seqmix/data/slimpajama.hpp>
#include <seqmix/tensor/error.hpp>

namespace {

namespace fs = std::filesystem;
using seqmix::data::document;

struct settings {
  std::string cache, folder, out, in_domain;
  std::vector<std::string> own_docs;
  std::size_t least = 65536;
  std::size_t most = 48000000;
};

/// A place with text: a folder, the file names that count, and words that exclude a path.
struct place {
  std::string package;  ///< unpacked package, or empty for what is installed
  std::string folder;   ///< inside the package, or absolute; a '*' in its last part takes the last match by name
  std::vector<std::string> suffixes;
  std::vector<std::string> without = {};
};

struct domain_plan {
  std::string name;
  bool code;
  std::vector<place> fetched;
  std::vector<place> installed;  ///< used when nothing was fetched
};

struct source_note {
  std::string package, version;
};

struct domain_text {
  std::string name;
  bool code = false;
  std::size_t documents = 0;
  std::string text;
  std::vector<source_note> sources;
};

struct left_out {
  std::string name, why;
};

std::vector<domain_plan> domain_plans() {
  std::vector<std::string> const html{".html"}, c{".c", ".h"}, python{".py"}, pod{".pod"};
  std::vector<std::string> const latex{".tex", ".tex.gz", ".dtx", ".dtx.gz"};
  std::vector<std::string> const manual{".1.gz", ".2.gz", ".3.gz", ".4.gz", ".5.gz", ".6.gz", ".7.gz", ".8.gz"};
  std::vector<std::string> const prose{".txt", ".txt.gz", ".html", ".md", ".md.gz", "README", "README.gz"};
  // Not prose: lists of links and key words, lists of patches.
  std::vector<std::string> const no_lists{"/tags.html", "genindex",      "bookindex", "crossref",
                                          "sitemap",    "keyword_index", "/version"};
  // Not code a person writes: tables of characters.
  std::vector<std::string> const c_without{"/testsuite/", "/iconv/"};
  std::vector<std::string> const python_without{"/test/",    "/tests/",         "/idlelib/",
                                                "/lib2to3/", "/dist-packages/", "/encodings/"};
  return {
      {"docs",
       false,
       {{"vim-doc", "", html, no_lists},
        {"postgresql-doc-15", "", html, no_lists},
        {"sqlite3-doc", "", html, no_lists},
        {"libreoffice-help-en-us", "", html, no_lists},
        {"git-doc", "", html, no_lists},
        // The manual holds ten languages; other languages than English are out of this domain.
        {"apache2-doc", "usr/share/doc/apache2-doc/manual/en", html, no_lists}},
       {{"", "/usr/share/man/man1", manual},
        {"", "/usr/share/man/man2", manual},
        {"", "/usr/share/man/man3", manual},
        {"", "/usr/share/man/man5", manual},
        {"", "/usr/share/man/man7", manual},
        {"", "/usr/share/man/man8", manual},
        {"", "/usr/share/doc", prose, {"hangelog", "copyright"}}}},
      {"books", false, {{"r-cran-janeaustenr", "", {"/data/Rdata.rdb"}}}, {}},
      {"dictionary",
       false,
       {{"dict-foldoc", "", {".dict.dz"}}, {"dict-jargon", "", {".dict.dz"}}, {"dict-gcide", "", {".dict.dz"}}},
       {}},
      {"code_python",
       true,
       {{"libpython3-stdlib", "usr/lib", python, python_without}},
       {{"", "/usr/lib/python3.*", python, python_without}}},
      {"code_c",
       true,
       {{"newlib-source", "", c, c_without}},
       {{"", "/usr/include", {".h", ".hpp", ".hh", ".c"}}, {"", "/usr/lib/gcc", {".h"}}}},
      {"code_linux", true, {{"linux-source-6.1", "", c}}, {}},
      {"faq",
       false,
       {{"perl-doc", "", pod, {"delta.pod", "perlcn", "perljp", "perlko", "perltw", "perltoc"}}},
       {{"", "/usr/share/perl", pod}, {"", "/usr/share/perl5", pod}}},
      {"latex", false, {{"texlive-latex-base-doc", "", latex}, {"texlive-latex-recommended-doc", "", latex}}, {}},
      {"german", false, {{"libreoffice-help-de", "", html}}, {{"", "/usr/share/man/de", manual}}},
      {"licences", false, {}, {{"", "/usr/share/common-licenses", {}}, {"", "/usr/share/doc", {"/copyright"}}}},
  };
}

bool ends_with_any(std::string const& path, std::vector<std::string> const& suffixes) {
  return suffixes.empty() ||
         std::any_of(suffixes.begin(), suffixes.end(), [&](auto const& end) { return path.ends_with(end); });
}

bool contains_any(std::string const& path, std::vector<std::string> const& words) {
  return std::any_of(words.begin(), words.end(),
                     [&](auto const& word) { return path.find(word) != std::string::npos; });
}

/// The bytes of a plain or gzip file (dictzip is gzip).
std::string read_file(std::string const& path) {
  if (!fs::is_regular_file(path)) throw seqmix::file_error("seqmix: prepare_text: " + path + " is no file");
  std::unique_ptr<gzFile_s, int (*)(gzFile)> const file(gzopen(path.c_str(), "rb"), gzclose);
  if (!file) throw seqmix::file_error("seqmix: prepare_text: cannot open " + path + ": " + std::strerror(errno));
  std::string bytes;
  std::vector<char> block(1 << 18);
  int got = 0;
  while ((got = gzread(file.get(), block.data(), unsigned(block.size()))) > 0)
    bytes.append(block.data(), std::size_t(got));
  int code = Z_OK;
  char const* const message = gzerror(file.get(), &code);
  if (got < 0 || (code != Z_OK && code != Z_STREAM_END))
    throw seqmix::file_error("seqmix: prepare_text: cannot read " + path + ": " + message);
  return bytes;
}

std::uint32_t big_endian(std::string_view bytes, std::size_t at) {
  std::uint32_t value = 0;
  for (std::size_t i = 0; i < 4; ++i) value = value << 8 | std::uint32_t(static_cast<unsigned char>(bytes[at + i]));
  return value;
}

/// The lines of one R character vector in R's XDR format, or nothing for another kind of object.
std::string r_character_vector(std::string_view object) {
  std::uint32_t constexpr string_vector = 16, string_item = 9, missing = 0xffffffffu;
  if (object.size() < 22 || !object.starts_with("X\n")) return {};
  std::size_t at = 14;                                               // the mark and three versions
  if (big_endian(object, 2) >= 3) at += 4 + big_endian(object, at);  // the name of the encoding
  if (at + 8 > object.size() || (big_endian(object, at) & 0xffu) != string_vector) return {};
  auto const count = big_endian(object, at + 4);
  at += 8;
  std::string lines;
  for (std::uint32_t i = 0; i < count && at + 8 <= object.size(); ++i) {
    if ((big_endian(object, at) & 0xffu) != string_item) break;
    auto const length = big_endian(object, at + 4);
    at += 8;
    if (length == missing) continue;
    if (at + length > object.size()) break;
    lines.append(object.substr(at, length));
    lines += '\n';
    at += length;
  }
  return lines;
}

/// The text in an R package's data base: records of [size of the object, 4 bytes][zlib stream].
std::string r_data_text(std::string& bytes) {
  std::string text;
  for (std::size_t at = 0; at + 4 < bytes.size();) {
    std::string object(std::min<std::size_t>(big_endian(bytes, at), std::size_t(1) << 28), '\0');
    z_stream stream{};
    if (inflateInit(&stream) != Z_OK) break;
    stream.next_in = reinterpret_cast<Bytef*>(bytes.data() + at + 4);
    stream.avail_in = uInt(bytes.size() - at - 4);
    stream.next_out = reinterpret_cast<Bytef*>(object.data());
    stream.avail_out = uInt(object.size());
    int const code = inflate(&stream, Z_FINISH);
    at += 4 + std::size_t(stream.total_in);
    inflateEnd(&stream);
    if (code != Z_STREAM_END) break;
    text += r_character_vector(object) + "\n";
  }
  return text;
}

bool is_manual_page(std::string const& path) { return path.find("/man/") != std::string::npos; }

/// Text as prose: HTML, manual pages and R data are converted by their name; binary files give nothing.
std::string document_text(std::string const& path) {
  auto bytes = read_file(path);
  if (path.ends_with(".rdb")) return r_data_text(bytes);
  if (std::memchr(bytes.data(), 0, std::min<std::size_t>(bytes.size(), 4096)) != nullptr) return {};
  if (path.ends_with(".html") || path.ends_with(".htm") || path.ends_with(".html.gz"))
    return seqmix::data::html_to_text(bytes);
  if (path.ends_with(".gz") && is_manual_page(path)) return seqmix::data::roff_to_text(bytes);
  return bytes;
}

/// A file to read and the name it keeps on every machine.
struct listed_file {
  std::string path, name;
};

enum class unreadable { is_error, is_passed_over };

/// Adds the files of a folder that count, under `prefix` and their place in the folder.
void list_files(std::string const& root, std::string const& prefix, place const& from, unreadable closed,
                std::vector<listed_file>& files) {
  std::error_code failure;
  auto const options = closed == unreadable::is_passed_over ? fs::directory_options::skip_permission_denied
                                                            : fs::directory_options::none;
  fs::recursive_directory_iterator it(root, options, failure);
  for (fs::recursive_directory_iterator const end; !failure && it != end; it.increment(failure)) {
    std::error_code dangling;  // a link to nowhere is no file
    if (!it->is_regular_file(dangling)) continue;
    auto const path = it->path().string();
    auto const relative = path.substr(root.size());
    if (ends_with_any(path, from.suffixes) && !contains_any(relative, from.without))
      files.push_back({path, prefix + relative});
  }
  if (failure && closed == unreadable::is_error)
    throw seqmix::file_error("seqmix: prepare_text: cannot read all of " + root + ": " + failure.message());
}

/// Reads files in the order of the hash of their names until `most` bytes; unreadable ones are an error, or are
/// passed over where the machine's own files are taken as they come.
std::vector<document> read_documents(std::vector<listed_file> files, std::size_t most, unreadable closed) {
  std::sort(files.begin(), files.end(), [](auto const& a, auto const& b) {
    return std::pair(seqmix::data::path_hash(a.name), a.name) < std::pair(seqmix::data::path_hash(b.name), b.name);
  });
  std::vector<document> documents;
  std::size_t bytes = 0;
  for (auto const& file : files) {
    if (bytes >= most) break;
    try {
      documents.push_back({file.name, document_text(file.path)});
    } catch (seqmix::file_error const&) {
      if (closed == unreadable::is_error) throw;
      continue;
    }
    bytes += documents.back().text.size();
  }
  return documents;
}

/// The packages of this cache and their versions, as fetch_text.sh wrote them; none without that file.
std::map<std::string, std::string> fetched_packages(std::string const& cache) {
  std::map<std::string, std::string> versions;
  std::ifstream list(cache + "/packages.tsv");
  for (std::string package, version; list >> package >> version;) versions[package] = version;
  return versions;
}

/// `folder`, or the last match by name when its last part ends in '*'.
std::string existing_folder(std::string const& folder) {
  if (!folder.ends_with('*')) return fs::is_directory(folder) ? folder : "";
  auto const parent = fs::path(folder).parent_path();
  auto const start = folder.substr(0, folder.size() - 1);
  std::string best;
  std::error_code failure;
  for (fs::directory_iterator it(parent, failure), end; !failure && it != end; it.increment(failure)) {
    auto const path = it->path().string();
    bool const newer = path.size() > best.size() || (path.size() == best.size() && path > best);
    if (path.starts_with(start) && it->is_directory() && newer) best = path;
  }
  return best;
}

domain_text from_packages(domain_plan const& plan, settings const& chosen,
                          std::map<std::string, std::string> const& versions) {
  domain_text domain{plan.name, plan.code, 0, {}, {}};
  std::vector<listed_file> files;
  for (auto const& from : plan.fetched) {
    // Python's library is in a package with the release in its name.
    auto const is_it = [&](auto const& entry) {
      return entry.first == from.package ||
             (from.package == "libpython3-stdlib" && entry.first.starts_with("libpython3.") &&
              entry.first.ends_with("-stdlib"));
    };
    auto const found = std::find_if(versions.begin(), versions.end(), is_it);
    if (found == versions.end()) continue;
    auto root = chosen.cache + "/unpacked/" + found->first;
    if (!from.folder.empty()) root += "/" + from.folder;
    list_files(root, found->first, from, unreadable::is_error, files);
    domain.sources.push_back({found->first, found->second});
  }
  auto documents = read_documents(std::move(files), 2 * chosen.most, unreadable::is_error);
  domain.documents = documents.size();
  domain.text = seqmix::data::clean_domain(std::move(documents), {}, chosen.most);
  return domain;
}

domain_text from_installed(domain_plan const& plan, settings const& chosen,
                           std::map<std::string, std::string> const& versions) {
  domain_text domain{plan.name, plan.code, 0, {}, {}};
  auto places = plan.installed;
  if (plan.name == "docs")
    for (auto const& folder : chosen.own_docs) places.push_back({"", folder, {".md", ".txt", ".html"}, {"/."}});
  std::vector<listed_file> files;
  for (auto const& from : places) {
    auto const root = existing_folder(from.folder);
    if (root.empty()) continue;
    list_files(root, root, from, unreadable::is_passed_over, files);
    auto const known = versions.find("installed:" + root);
    domain.sources.push_back({"installed:" + root, known == versions.end() ? std::string() : known->second});
  }
  auto documents = read_documents(std::move(files), 2 * chosen.most, unreadable::is_passed_over);
  domain.documents = documents.size();
  domain.text = seqmix::data::clean_domain(std::move(documents), {}, chosen.most);
  return domain;
}

/// Domains from fetched packages; what could not be fetched comes from the machine's own text where there is some.
std::vector<domain_text> from_cache(settings const& chosen, std::vector<left_out>& missing) {
  auto const versions = fetched_packages(chosen.cache);
  std::vector<domain_text> domains;
  for (auto const& plan : domain_plans()) {
    // Licences are a poor domain, taken only where better ones are few.
    if (plan.name == "licences" && domains.size() > 4) continue;
    auto domain = from_packages(plan, chosen, versions);
    if (domain.text.size() < chosen.least && !plan.installed.empty())
      domain = from_installed(plan, chosen, versions);
    if (domain.text.size() >= chosen.least) {
      domains.push_back(std::move(domain));
    } else if (plan.name != "code_linux" && plan.name != "latex") {
      missing.push_back({plan.name, std::to_string(domain.text.size()) + " bytes of text found, needed at least " +
                                        std::to_string(chosen.least)});
    }
  }
  return domains;
}

bool is_code(std::string name) {
  std::transform(name.begin(), name.end(), name.begin(), seqmix::data::detail::lower);
  return name.starts_with("code") || name == "github";
}

void expect_size(domain_text const& domain, std::string const& path, std::size_t least) {
  if (domain.text.size() < least)
    throw seqmix::file_error("seqmix: prepare_text: domain " + domain.name + " (" + path + ") is " +
                             (domain.text.empty() ? "empty" : "too short") + ": expected at least " +
                             std::to_string(least) + " bytes of text, got " + std::to_string(domain.text.size()));
}

std::vector<domain_text> from_folders(settings const& chosen) {
  std::vector<std::string> folders;
  for (auto const& entry : fs::directory_iterator(chosen.folder))
    if (entry.is_directory() && !entry.path().filename().string().starts_with("."))
      folders.push_back(entry.path().string());
  std::sort(folders.begin(), folders.end());
  std::vector<domain_text> domains;
  for (auto const& folder : folders) {
    auto const name = fs::path(folder).filename().string();
    domain_text domain{name, is_code(name), 0, {}, {{folder, ""}}};
    std::vector<listed_file> files;
    list_files(folder, name, {"", "", {}, {"/."}}, unreadable::is_error, files);
    auto documents = read_documents(std::move(files), 2 * chosen.most, unreadable::is_error);
    domain.documents = documents.size();
    // A person's text may hold a paragraph in one line: no line is too long here.
    domain.text = seqmix::data::clean_domain(std::move(documents), {.longest_line = SIZE_MAX, .repeated_line = 40},
                                             chosen.most);
    expect_size(domain, folder, chosen.least);
    domains.push_back(std::move(domain));
  }
  return domains;
}

bool is_slimpajama_file(std::string const& path) {
  return path.ends_with(".jsonl") || path.ends_with(".jsonl.zst");
}

std::vector<std::string> slimpajama_files(std::string const& path) {
  if (fs::is_regular_file(path)) return is_slimpajama_file(path) ? std::vector{path} : std::vector<std::string>{};
  std::vector<listed_file> files;
  list_files(path, "", {"", "", {".jsonl", ".jsonl.zst"}}, unreadable::is_error, files);
  std::vector<std::string> paths;
  for (auto const& file : files) paths.push_back(file.path);
  std::sort(paths.begin(), paths.end());
  return paths;
}

/// Domains of SlimPajama: CommonCrawl and C4 together are the training domain, the other sets are tested on. The
/// data are clean and without repetitions already: only the order is changed.
std::vector<domain_text> from_slimpajama(std::vector<std::string> const& paths, settings const& chosen,
                                         std::vector<left_out>& missing) {
  std::map<std::string, std::vector<document>> documents;
  seqmix::data::slimpajama_count taken{};
  for (auto const& path : paths)
    seqmix::data::read_slimpajama(
        path, chosen.most, taken, [&](auto set, std::string_view text, std::uint64_t line) {
          auto const name =
              seqmix::data::in_domain(set) ? "web" : std::string(name_of(set).substr(std::strlen("RedPajama")));
          documents[name].push_back(
              {fs::path(path).filename().string() + ":" + std::to_string(line), std::string(text)});
        });
  std::vector<domain_text> domains;
  for (auto& [name, texts] : documents) {
    domain_text domain{name, is_code(name), texts.size(), {}, {}};
    for (auto const& path : paths) domain.sources.push_back({path, ""});
    domain.text =
        seqmix::data::clean_domain(std::move(texts), {.longest_line = SIZE_MAX, .repeated_line = SIZE_MAX});
    if (name == "web") expect_size(domain, chosen.folder, chosen.least);
    if (domain.text.size() >= chosen.least)
      domains.push_back(std::move(domain));
    else
      missing.push_back({name, std::to_string(domain.text.size()) + " bytes of text found, needed at least " +
                                   std::to_string(chosen.least)});
  }
  return domains;
}

std::vector<domain_text> gather(settings& chosen, std::vector<left_out>& missing) {
  if (chosen.folder.empty()) {
    if (chosen.in_domain.empty()) chosen.in_domain = "docs";
    return from_cache(chosen, missing);
  }
  if (!fs::exists(chosen.folder))
    throw seqmix::file_error("seqmix: prepare_text: --data " + chosen.folder + " does not exist");
  auto const paths = slimpajama_files(chosen.folder);
  if (!paths.empty()) {
    if (chosen.in_domain.empty()) chosen.in_domain = "web";
    return from_slimpajama(paths, chosen, missing);
  }
  if (!fs::is_directory(chosen.folder))
    throw seqmix::file_error("seqmix: prepare_text: --data " + chosen.folder +
                             " is neither a folder nor a .jsonl or .jsonl.zst file");
  if (chosen.in_domain.empty()) chosen.in_domain = "in";
  auto domains = from_folders(chosen);
  if (domains.empty())
    throw seqmix::file_error("seqmix: prepare_text: --data " + chosen.folder +
                             " holds no subfolders (one for each domain) and no .jsonl or .jsonl.zst files");
  return domains;
}

/// Puts the training domain first. Where the fetched one is missing altogether, the largest takes its place.
void choose_in_domain(std::vector<domain_text>& domains, settings& chosen, std::vector<left_out>& missing) {
  if (domains.size() < 2)
    throw seqmix::file_error("seqmix: prepare_text: expected a training domain and at least one other, found " +
                             std::to_string(domains.size()) + " with enough text");
  auto const named = [&](auto const& domain) { return domain.name == chosen.in_domain; };
  auto at = std::find_if(domains.begin(), domains.end(), named);
  if (at == domains.end() && chosen.folder.empty() && chosen.in_domain == "docs") {
    at = std::max_element(domains.begin(), domains.end(),
                          [](auto const& a, auto const& b) { return a.text.size() < b.text.size(); });
    missing.push_back({"docs", "the training domain is " + at->name + " instead"});
    chosen.in_domain = at->name;
  }
  if (at == domains.end()) {
    std::string names;
    for (auto const& domain : domains) names += (names.empty() ? "" : ", ") + domain.name;
    throw seqmix::option_error("seqmix: prepare_text: there is no domain \"" + chosen.in_domain +
                               "\" to train on (see --in-domain), only " + names);
  }
  std::rotate(domains.begin(), at, at + 1);
}

void write_file(fs::path const& path, std::string const& bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), std::streamsize(bytes.size()));
  file.close();
  if (!file)
    throw seqmix::file_error("seqmix: prepare_text: cannot write " + path.string() + ": " + std::strerror(errno));
}

/// Writes everything beside the final folder and swaps it in at the end: an earlier result stays until then.
void write_domains(std::vector<domain_text> const& domains, std::vector<left_out> const& missing,
                   settings const& chosen) {
  auto const out = fs::path(chosen.out);
  bool const used = fs::exists(out) && !(fs::is_directory(out) && fs::is_empty(out));
  if (used && !fs::exists(out / "domains.json"))
    throw seqmix::file_error("seqmix: prepare_text: " + chosen.out +
                             " exists and was not made by this program; name another folder with --out");
  auto const fresh = fs::path(chosen.out + ".new"), old = fs::path(chosen.out + ".old");
  fs::remove_all(fresh);
  fs::remove_all(old);
  auto list = nlohmann::ordered_json{{"format", "seqmix-text-1"}, {"in_domain", chosen.in_domain}};
  for (auto const& domain : domains) {
    auto const parts = seqmix::data::split_domain(domain.text);
    bool const in = domain.name == chosen.in_domain;
    fs::create_directories(fresh / domain.name);
    write_file(fresh / domain.name / "train.txt", parts.train);
    write_file(fresh / domain.name / "validation.txt", parts.validation);
    write_file(fresh / domain.name / "test.txt", parts.test);
    auto sources = nlohmann::ordered_json::array();
    for (auto const& source : domain.sources)
      sources.push_back({{"package", source.package}, {"version", source.version}});
    list["domains"].push_back(
        {{"name", domain.name},
         {"role", in ? "in" : "ood"},
         {"code", domain.code},
         {"documents", domain.documents},
         {"bytes",
          {{"train", parts.train.size()}, {"validation", parts.validation.size()}, {"test", parts.test.size()}}},
         {"sources", sources}});
    std::printf("%-14s %-4s %10zu %10zu %10zu\n", domain.name.c_str(), in ? "in" : "ood", parts.train.size(),
                parts.validation.size(), parts.test.size());
  }
  list["left_out"] = nlohmann::ordered_json::array();
  for (auto const& entry : missing) list["left_out"].push_back({{"name", entry.name}, {"why", entry.why}});
  write_file(fresh / "domains.json", list.dump(2) + "\n");
  if (fs::exists(out)) fs::rename(out, old);
  fs::rename(fresh, out);
  fs::remove_all(old);
}

void prepare(settings chosen) {
  while (chosen.folder.size() > 1 && chosen.folder.ends_with('/')) chosen.folder.pop_back();
  while (chosen.out.size() > 1 && chosen.out.ends_with('/')) chosen.out.pop_back();
  if (chosen.out.empty()) chosen.out = chosen.cache + "/text";
  std::vector<left_out> missing;
  auto domains = gather(chosen, missing);
  choose_in_domain(domains, chosen, missing);
  std::printf("%-14s %-4s %10s %10s %10s\n", "domain", "role", "train", "validation", "test");
  write_domains(domains, missing, chosen);
  for (auto const& entry : missing) std::printf("left out: %s: %s\n", entry.name.c_str(), entry.why.c_str());
  if (domains.size() < 5)
    std::printf("only %zu domains outside the training domain, four are recommended\n", domains.size() - 1);
  std::printf("text in %s\n", chosen.out.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  settings chosen;
  CLI::App app{
      "Prepares the text of a limited-domain study: one folder for each domain with train.txt, validation.txt "
      "and test.txt, and domains.json."};
  app.add_option("cache", chosen.cache, "The folder that fetch_text.sh filled; the result goes to CACHE/text")
      ->required();
  app.add_option(
      "--data", chosen.folder,
      "Own text instead: a folder with one subfolder of text files for each domain, or SlimPajama .jsonl or "
      ".jsonl.zst files (a file, or a folder of them)");
  app.add_option("--in-domain", chosen.in_domain,
                 "The domain to train on [docs; in with --data; web for SlimPajama]");
  app.add_option("--out", chosen.out, "Where the result goes [CACHE/text]");
  app.add_option("--own-docs", chosen.own_docs,
                 "A folder of documentation that counts as docs when none was fetched");
  app.add_option("--least", chosen.least, "The smallest domain that is used, in bytes")->capture_default_str();
  app.add_option("--most", chosen.most, "The most text taken for a domain (SlimPajama: for a set), in bytes")
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    prepare(std::move(chosen));
  } catch (fs::filesystem_error const& failure) {
    std::fprintf(stderr, "seqmix: prepare_text: %s\n", failure.what());
    return 1;
  } catch (std::exception const& failure) {
    std::fprintf(stderr, "%s\n", failure.what());
    return 1;
  }
}
