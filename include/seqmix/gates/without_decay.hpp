#pragma once

#include <seqmix/concepts/gate.hpp>
#include <seqmix/gates/detail/name_text.hpp>

namespace seqmix::inline v0::gates {

/// A gate that forgets nothing, the ablation "does it have to decay?": the log-decay is 0, the write scale stays.
/// Of a gate that scales what is written the raw values and the parameters per head stay too, the ones that only
/// the decay read included, so that both models have the same projections and start values; parameters per key
/// channel cannot reach a write scale per head and are left out. Of any other gate nothing is left: it is `none`.
template <gate G>
struct without_decay {
 private:
  static constexpr bool writes = G::spec.writes;
  static constexpr std::size_t raws = writes ? gate_detail::raws<G> : 0, all = gate_detail::parameters<G>;
  static constexpr bool stays(std::size_t i) { return writes && G::parameters[i].on == axis::head; }
  static constexpr std::size_t count_staying() {
    std::size_t n = 0;
    for (std::size_t i = 0; i < all; ++i)
      if (stays(i)) ++n;
    return n;
  }
  static constexpr std::size_t staying = count_staying();
  static constexpr auto places() {
    std::array<std::size_t, staying> result{};
    for (std::size_t i = 0, n = 0; i < all; ++i)
      if (stays(i)) result.at(n++) = i;
    return result;
  }
  static constexpr std::array<std::size_t, staying> place = places();
  static constexpr gate_spec undecayed(gate_spec s) {
    if (!s.writes) return {.decays = false};
    s.decays = s.factored = false;
    s.decay = axis::head;
    return s;
  }
  static constexpr auto staying_parameters() {
    std::array<gate_parameter, staying> result{};
    for (std::size_t n = 0; n < staying; ++n) {
      result.at(n) = G::parameters[place[n]];
      result.at(n).log_rate = false;  // there is no rate
    }
    return result;
  }
  template <class T>
  static std::array<T, all> filled(std::array<T, staying> const& p) noexcept {
    std::array<T, all> result{};
    for (std::size_t n = 0; n < staying; ++n) result[place[n]] = p[n];
    return result;
  }

 public:
  static constexpr auto text = detail::name_text{}.add("without_decay<").add(G::name).add(">");
  static constexpr std::string_view name = text.view();
  static constexpr gate_spec spec = undecayed(G::spec);
  static constexpr std::array<gate_parameter, staying> parameters = staying_parameters();

  static double initial(std::size_t parameter, gate_element const& e) requires(staying > 0) {
    return G::initial(place.at(parameter), e);
  }
  static double bias_initial(std::size_t raw,
                             gate_element const& e) requires(writes&& gate_detail::has_bias_initial<G>) {
    return G::bias_initial(raw, e);
  }
  template <class T>
  static gate_value<T> forward(std::array<T, raws> const& raw, std::array<T, staying> const& p) noexcept {
    if constexpr (writes)
      return {T(0), G::template forward<T>(raw, filled(p)).write};
    else
      return {};
  }
  template <class T>
  static gate_value<T> first(std::array<T, raws> const& raw, std::array<T, staying> const& p) noexcept
      requires(writes&& gate_detail::has_first<G>) {
    return {T(0), G::template first<T>(raw, filled(p)).write};
  }
};

}  // namespace seqmix::inline v0::gates
