#pragma once

#include <seqmix/models/language_model.hpp>

namespace seqmix::inline v0 {

/// The effective context length of one head: how many tokens its decays let it look back on average.
struct head_length {
  index_t layer = 0, part = 0, head = 0;  ///< `part`: which mixer of the layer's block
  double tau = 0.0;  ///< 1 / mean decay rate, over tokens and key channels; infinite without decay
};

namespace detail {

template <class Gate, class T>
double mean_decay_rate(typename gate_room<Gate>::template values<T> const& v, index_t head) {
  double sum = 0.0;
  index_t count = 0;
  index_t const rows = v.g_rhk.stride[0] == 0 ? (std::min)(v.g_rhk.extent[0], index_t(1)) : v.g_rhk.extent[0];
  for (index_t r = 0; r < rows; ++r)
    for (index_t k = 0; k < (v.rate_hk ? v.rate_hk.extent[1] : v.g_rhk.extent[2]); ++k, ++count)
      sum -= v.rate_hk ? double(v.g_rhk(r, head, 0)) * double(v.rate_hk(head, k)) : double(v.g_rhk(r, head, k));
  return count > 0 ? sum / double(count) : 0.0;
}

template <class Layer, class Saved, class F>
void for_each_mixer(Layer const& l, Saved const& saved, index_t& part, F const& f) {
  if constexpr (requires { l.parts(); }) {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      (for_each_mixer(std::get<I>(l.parts()), std::get<I>(saved.part), part, f), ...);
    }
    (std::make_index_sequence<std::tuple_size_v<std::remove_cvref_t<decltype(l.parts())>>>{});
  } else {
    if constexpr (requires {
                    typename Layer::gate_type;
                    saved.gate;
                  })
      f(l, saved, part);
    ++part;
  }
}

}  // namespace detail

/// tau of every head with a decaying gate, from the log-decays of the last forward of a memory made for training
/// (others keep the last layer's alone). Source: tau = e^-lambda, Tong et al. (arXiv 2609.16540), section on
/// theory.
template <class Model, class Memory>
std::vector<head_length> effective_lengths(Model const& model, Memory const& mem) {
  if (!mem.run.training)
    throw option_error("seqmix: effective_lengths: the memory keeps no gates; make it with training = true");
  std::vector<head_length> all;
  model.for_each_layer(mem, [&](index_t layer, auto const& l, auto const& saved) {
    index_t part = 0;
    detail::for_each_mixer(l, saved, part, [&](auto const& x, auto const& s, index_t at) {
      using gate_type = typename std::remove_cvref_t<decltype(x)>::gate_type;
      if constexpr (gate_type::spec.decays) {
        using number = std::remove_pointer_t<decltype(s.gate.g_rhk.data)>;
        for (index_t h = 0; h < s.gate.g_rhk.extent[1]; ++h)
          all.push_back({layer, at, h, 1.0 / detail::mean_decay_rate<gate_type, number>(s.gate, h)});
      }
    });
  });
  return all;
}

}  // namespace seqmix::inline v0
