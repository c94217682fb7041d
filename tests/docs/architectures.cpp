#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <type_traits>

#include <doctest/doctest.h>

#include <seqmix/models/arbitrary_selection.hpp>
#include <seqmix/models/variants.hpp>

// The table of docs/architectures.md is what this file prints. With SEQMIX_WRITE_DOCS=1 in the environment the test
// writes the page instead of comparing it.

namespace {

using namespace seqmix;

std::string const root = std::string(SEQMIX_GOLDEN_DIR) + "/../..";

std::string text_of(std::string const& path) {
  std::ifstream file(path);
  DOCTEST_REQUIRE_MESSAGE(file.good(), "cannot read ", path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

/// The layer that mixes, of a layer or of a block.
template <class L>
struct mixing_layer;
template <class M, extras E>
struct mixing_layer<layer<M, E>> {
  using mixer = M;
  static constexpr extras surroundings = E;
  static std::string behind() { return ""; }
};
template <class First, class... Rest>
struct mixing_layer<block<First, Rest...>> : mixing_layer<First> {
  static std::string behind() {
    std::string text;
    ((text += ", then " + Rest::name()), ...);
    return text;
  }
};

template <class First, class... Rest>
struct mixing_layer<parallel_block<First, Rest...>> : mixing_layer<First> {
  static std::string behind() {
    std::string text;
    ((text += ", beside " + Rest::name()), ...);
    return text;
  }
};

template <class M>
std::string selector_of() {
  using which_type = typename M::selector_type::which_type;
  using how_type = typename M::selector_type::how_type;
  std::string text = std::string(which_type::name) + ", " + std::string(how_type::name);
  if constexpr (requires { how_type::details(); }) text += " (" + how_type::details() + ")";
  if constexpr (requires { which_type::details(); }) text += " (" + which_type::details() + ")";
  return text;
}

/// The words of a variant's name, commas as in a sentence.
std::string extras_of(extras e) {
  std::string const norm = e.norm == norm_kind::rms     ? "RMS norm"
                           : e.norm == norm_kind::layer ? "layer norm"
                                                        : "no norm";
  e.norm = norm_kind::rms;
  e.residual = true;
  std::string text = norm, name = extras_name(e);
  for (char c : name) text += c == ',' ? std::string(", ") : c == '_' ? std::string(" ") : std::string(1, c);
  return text;
}

std::string yes(bool is) { return is ? "yes" : "no"; }

/// Where kernels are; `On` asks for forward and backward in one type of number.
template <template <class Device, class T> class On>
std::string devices() {
  std::string text;
  auto const add = [&](bool is, char const* name) {
    if (is) text += (text.empty() ? "" : ", ") + std::string(name);
  };
  add(On<device::cpu, float>::value && On<device::cpu, double>::value, "cpu");
  add(On<device::cuda, float>::value, "cuda");
  return text.empty() ? "none" : text;
}
template <class M>
struct mixer_kernels {
  template <class Device, class T>
  using on = std::bool_constant<mixer_on<M, Device, T>>;
};
template <class L>
struct layer_kernels {
  template <class Device, class T>
  using on = std::bool_constant<layer_on<L, Device, T>>;
};

template <class Layer>
std::string row(std::string const& name) {
  using parts = mixing_layer<Layer>;
  using M = typename parts::mixer;
  return "| `" + name + "` | " + std::string(M::state_type::name) + " | " + std::string(M::gate_type::name) +
         " | " + selector_of<M>() + " | " + extras_of(parts::surroundings) + parts::behind() + " | " +
         yes(layer_selects_arbitrarily<Layer>) + " | " + devices<mixer_kernels<M>::template on>() + " | " +
         yes(mixer_type<M>) + " |\n";
}

/// A layer that is not made of a mixer and extras.
template <class L>
std::string row_of_its_own(std::string const& name, std::string const& state, std::string const& gate) {
  return "| `" + name + "` | " + state + " | " + gate + " | all, linear | a layer of its own: " + L::name() +
         " | " + yes(layer_selects_arbitrarily<L>) + " | " + devices<layer_kernels<L>::template on>() + " | " +
         yes(layer_with_oracle<L>) + " |\n";
}

std::string table() {
  return std::string("| variant | state | gate | selector: which, how | around the mixer | `arbitrary_selection` | "
                     "devices | reference |\n") +
         "|---|---|---|---|---|---|---|---|\n" + row<variants::transformer_pp>("transformer_pp") +
         row<variants::gpt_neox>("gpt_neox") + row<variants::sliding_window>("sliding_window") +
         row<variants::alibi>("alibi") + row<variants::fox>("fox") + row<variants::moba>("moba") +
         row<variants::nsa>("nsa") + row<variants::top1_element>("top1_element") +
         row<variants::top1_chunk>("top1_chunk") + row<variants::linear_attention>("linear_attention") +
         row<variants::normalised_linear_attention>("normalised_linear_attention") +
         row<variants::retnet>("retnet") + row<variants::gla>("gla") + row<variants::hgrn>("hgrn") +
         row<variants::hgrn2>("hgrn2") + row<variants::mamba1>("mamba1") + row<variants::mamba2>("mamba2") +
         row_of_its_own<variants::mamba3>("mamba3", "outer_product", "mamba3") +
         row_of_its_own<variants::s4d>("s4d", "complex diagonal", "its own, constant") +
         row<variants::deltanet>("deltanet") + row<variants::gated_deltanet>("gated_deltanet") +
         row<variants::kda>("kda") + row<variants::kda_bounded>("kda_bounded") + row<variants::rwkv4>("rwkv4") +
         row<variants::rwkv5>("rwkv5") + row<variants::rwkv6>("rwkv6") + row<variants::rwkv7>("rwkv7") +
         row<variants::rg_lru>("rg_lru") + row<variants::min_gru>("min_gru") + row<variants::min_lstm>("min_lstm") +
         row_of_its_own<variants::mlstm>("mlstm", "mlstm", "mlstm") +
         row_of_its_own<variants::slstm>("slstm", "four vectors", "its own");
}

}  // namespace

DOCTEST_TEST_CASE("docs/architectures.md holds the table that the code prints") {
  std::string const page = root + "/docs/architectures.md", begin = "<!-- table -->\n", end = "<!-- /table -->\n";
  auto const text = text_of(page);
  auto const from = text.find(begin), to = text.find(end);
  DOCTEST_REQUIRE_MESSAGE((from != std::string::npos && to != std::string::npos), page,
                          " has no place for the table");
  auto const now = text.substr(0, from + begin.size()) + table() + text.substr(to);
  if (std::getenv("SEQMIX_WRITE_DOCS") != nullptr) std::ofstream(page) << now;
  DOCTEST_CHECK_MESSAGE(text_of(page) == now, "the table is now\n", table());
}

DOCTEST_TEST_CASE("every named variant stands in the table") {
  auto const header = text_of(root + "/include/seqmix/models/variants.hpp"), all = table();
  for (std::size_t at = header.find("\nusing "); at != std::string::npos; at = header.find("\nusing ", at + 1)) {
    auto const name = header.substr(at + 7, header.find(' ', at + 7) - at - 7);
    // Templates that make the others, parts of a block, and patterns of several layers.
    if (name == "attention_block" || name == "kda_with" || name.find("_time_mix") != std::string::npos) continue;
    if (name == "hybrid" || name == "griffin") continue;
    DOCTEST_CHECK_MESSAGE(all.find("| `" + name + "` |") != std::string::npos, name, " is missing");
  }
}
