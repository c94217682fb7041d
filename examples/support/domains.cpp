#include <algorithm>
#include <fstream>

#include <nlohmann/json.hpp>

#include "study.hpp"

namespace study {

domain const& training_domain(std::vector<domain> const& domains) {
  return *std::find_if(domains.begin(), domains.end(), [](domain const& d) { return d.trained_on; });
}

std::vector<domain> load_domains(settings const& s) {
  auto const list = s.text / "domains.json";
  std::ifstream file(list);
  if (!file) throw seqmix::file_error(s.program + ": cannot open " + list.string() + "; prepare_text writes it");
  nlohmann::json json;
  try {
    json = nlohmann::json::parse(file);
    std::vector<domain> domains;
    for (auto const& entry : json.at("domains")) {
      domain d;
      d.name = entry.at("name").get<std::string>();
      d.trained_on = entry.at("role") == "in";
      d.code = entry.at("code").get<bool>();
      auto const least = std::size_t(s.block + 2);
      d.text = seqmix::data::load_corpus((s.text / d.name).string(), d.name, least,
                                         d.trained_on ? seqmix::data::corpus_parts::all
                                                      : seqmix::data::corpus_parts::test_only);
      domains.push_back(std::move(d));
    }
    for (auto& d : domains) {
      d.short_windows = seqmix::data::evaluation_windows(d.text.test, s.block, s.short_bytes);
      d.long_windows = seqmix::data::evaluation_windows(d.text.test, s.block, s.long_bytes);
    }
    if (std::none_of(domains.begin(), domains.end(), [](domain const& d) { return d.trained_on; }))
      throw seqmix::file_error(s.program + ": " + list.string() + " has no domain to train on");
    return domains;
  } catch (nlohmann::json::exception const& e) {
    throw seqmix::file_error(s.program + ": " + list.string() + " is not a list of domains: " + e.what());
  }
}

}  // namespace study
