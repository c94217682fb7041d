#pragma once

#include <seqmix/concepts/gate.hpp>
#include <seqmix/gates/detail/name_text.hpp>

namespace seqmix::inline v0::gates {

/// A gate without its input, the ablation "does the decay have to depend on the token?": the same formula with its
/// own parameters, each raw value replaced by a trained number, which starts where the bias of the projection does,
/// else at 0. Of a gate without raw values it is that gate under another name. Cost: that of the formula, once a
/// sequence instead of once a token.
template <gate G>
struct constant_form {
 private:
  static constexpr std::size_t raws = gate_detail::raws<G>, own = gate_detail::parameters<G>;
  static constexpr std::array<std::string_view, 2> raw_names{raws == 1 ? "raw" : "raw_0", "raw_1"};
  static constexpr gate_spec without_input(gate_spec s) {
    s.raws = 0;
    s.from = feed::nothing;
    s.bias = false;
    s.inside = hidden::identity;
    s.source = feed_source::input;
    return s;
  }
  static constexpr auto with_raw_values() {
    std::array<gate_parameter, own + raws> all{};
    for (std::size_t i = 0; i < own; ++i) all[i] = G::parameters[i];
    for (std::size_t i = 0; i < raws; ++i) all[own + i] = {.name = raw_names.at(i), .on = G::spec.raw};
    return all;
  }
  template <class T>
  struct arguments {
    std::array<T, raws> raw{};
    std::array<T, own> p{};
    explicit arguments(std::array<T, own + raws> const& all) noexcept {
      for (std::size_t i = 0; i < own; ++i) p[i] = all[i];
      for (std::size_t i = 0; i < raws; ++i) raw[i] = all[own + i];
    }
  };

 public:
  static constexpr auto text = detail::name_text{}.add("constant_form<").add(G::name).add(">");
  static constexpr std::string_view name = text.view();
  static constexpr gate_spec spec = without_input(G::spec);
  static constexpr std::array<gate_parameter, own + raws> parameters = with_raw_values();

  static double initial(std::size_t parameter, gate_element const& e) {
    if constexpr (own > 0)
      if (parameter < own) return G::initial(parameter, e);
    if constexpr (gate_detail::has_bias_initial<G>) return G::bias_initial(parameter - own, e);
    return 0.0;
  }
  template <class T>
  static gate_value<T> forward(std::array<T, 0> const&, std::array<T, own + raws> const& p) noexcept {
    arguments<T> const a(p);
    return G::template forward<T>(a.raw, a.p);
  }
  template <class T>
  static gate_value<T> first(std::array<T, 0> const&,
                             std::array<T, own + raws> const& p) noexcept requires gate_detail::has_first<G> {
    arguments<T> const a(p);
    return G::template first<T>(a.raw, a.p);
  }
  template <class T>
  static T log_rate(std::array<T, own + raws> const& p) noexcept requires(G::spec.factored) {
    return G::template log_rate<T>(arguments<T>(p).p);
  }
  template <class T>
  static T log_step(std::array<T, 0> const&, std::array<T, own + raws> const& p) noexcept
      requires(G::spec.factored) {
    arguments<T> const a(p);
    return G::template log_step<T>(a.raw, a.p);
  }
};

}  // namespace seqmix::inline v0::gates
