#include <fstream>

#include <nlohmann/json.hpp>

#include "study.hpp"

namespace study {

domain const& training_domain(std::vector<domain> const& domains) {
  for (auto const& d : domains)
    if (d.trained_on) return d;
  throw seqmix::file_error("limited_domain: the text has no domain to train on");
}

std::vector<domain> load_domains(settings const& s) {
  auto const list = s.text / "domains.json";
  std::ifstream file(list);
  if (!file) throw seqmix::file_error("limited_domain: cannot open " + list.string() + "; prepare_text writes it");
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
    training_domain(domains);
    return domains;
  } catch (nlohmann::json::exception const& e) {
    throw seqmix::file_error("limited_domain: " + list.string() + " is not a list of domains: " + e.what());
  }
}

}  // namespace study
