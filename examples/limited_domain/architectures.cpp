#include "architectures.hpp"

namespace study {

namespace {
struct entry {
  char const* name;
  std::unique_ptr<architecture> (*make)(settings const&);
};
constexpr entry entries[] = {{"transformer_pp", make_transformer_pp},
                             {"mamba2", make_mamba2},
                             {"retnet", make_retnet},
                             {"top1_element", make_top1_element},
                             {"top1_chunk", make_top1_chunk}};
}  // namespace

std::vector<std::string> architecture_names() {
  std::vector<std::string> names;
  for (auto const& e : entries) names.emplace_back(e.name);
  return names;
}

std::unique_ptr<architecture> make_architecture(std::string const& name, settings const& s) {
  std::string known;
  for (auto const& e : entries) {
    if (name == e.name) return e.make(s);
    known += std::string(known.empty() ? "" : ", ") + e.name;
  }
  throw seqmix::option_error("limited_domain: --arch: unknown architecture '" + name + "'; compiled in are " +
                             known);
}

}  // namespace study
