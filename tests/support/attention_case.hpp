#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "golden.hpp"
#include "random_numbers.hpp"
#include <seqmix/kernels/attention_shape.hpp>
#include <seqmix/selectors/all.hpp>
#include <seqmix/selectors/chunks.hpp>
#include <seqmix/selectors/linear.hpp>
#include <seqmix/selectors/softmax.hpp>
#include <seqmix/selectors/top1.hpp>
#include <seqmix/selectors/window.hpp>

/// The golden attention cases (and random ones of the same form) as the library's attention reads them.
namespace seqmix::testing {

enum class visible_keys { all, window, own_plus_top1, exactly_one, window_plus_top1 };
enum class row_weights { softmax, linear, top1 };

/// Which selector a case asks for.
struct selector_request {
  visible_keys visible = visible_keys::all;
  chunk_score score = chunk_score::mean_key;
  chunk_gradient gradient = chunk_gradient::index_constant;
  chunk_probability probability = chunk_probability::mass;
  row_weights weights = row_weights::softmax;
  selectors::top1_output output = selectors::top1_output::hard;
  selectors::top1_gradient surrogate = selectors::top1_gradient::straight_through;
};

/// An input as stored. Most are read as they are; some spread: one key for many rows, a slope as a constant gate.
struct case_input {
  buffer<double> value;
  std::optional<golden_tensor> gradient;
};

struct attention_case {
  enum part { q, k, v, g, s0, sink, parts };
  enum class key_source { tokens, positions, one };
  enum class gate_source { none, tokens, log_decays, slopes };

  std::string name;
  attention_shape shape;
  std::vector<index_t> offsets;  ///< behind shape.seq when packed
  index_t length = 0;            ///< of each sequence of a batch
  selector_request selector;
  key_source keys = key_source::tokens;
  gate_source gate = gate_source::none;
  std::array<case_input, parts>
      input;  ///< q, k, v, g in the order of rows [R,H,C]; s0: initial state [N,H,K,V]; sink [H]
  buffer<double> cot_o, cot_state;
  std::optional<golden_tensor> o, state, lse;
  std::vector<index_t> choice;  ///< [R,H], empty when the case has none

  index_t rows() const noexcept { return shape.seq.rows(); }
  index_t key_index(index_t r, index_t h, index_t c) const noexcept {
    index_t const row = keys == key_source::tokens ? r : keys == key_source::positions ? r % length : 0;
    return (row * shape.key_heads + h) * shape.key_dim + c;
  }
  bool constant_gate() const noexcept { return gate == gate_source::log_decays || gate == gate_source::slopes; }
};

/// A case's inputs as numbers of type T. An initial state is a past of key_dim tokens: unit keys, its rows as
/// values.
template <class T>
struct attention_arrays {
  buffer<T> q, k, v, g, past_k, past_v, past_g, sink;
  std::vector<index_t> past_length;
  attention_input<T> in;
};

/// get(part, i) gives entry i of the stored input as T.
template <class T, class Get>
attention_arrays<T> arrays_of(attention_case const& c, Get const& get) {
  using enum attention_case::part;
  auto const& s = c.shape;
  index_t const rows = c.rows();
  attention_arrays<T> a;
  a.q = buffer<T>(rows * s.heads * s.key_dim);
  a.k = buffer<T>(rows * s.key_heads * s.key_dim);
  a.v = buffer<T>(rows * s.value_heads * s.value_dim);
  for (index_t i = 0; i < a.q.size(); ++i) a.q[i] = get(q, i);
  for (index_t i = 0; i < a.v.size(); ++i) a.v[i] = get(v, i);
  for (index_t r = 0, i = 0; r < rows; ++r)
    for (index_t h = 0; h < s.key_heads; ++h)
      for (index_t x = 0; x < s.key_dim; ++x) a.k[i++] = get(k, c.key_index(r, h, x));
  a.in.q_rhk = view3<T const>(a.q.data(), {rows, s.heads, s.key_dim});
  a.in.k_rhk = view3<T const>(a.k.data(), {rows, s.key_heads, s.key_dim});
  a.in.v_rhv = view3<T const>(a.v.data(), {rows, s.value_heads, s.value_dim});

  if (c.gate != attention_case::gate_source::none) {
    index_t const gate_rows = c.constant_gate() ? 1 : rows;
    index_t const channels = c.input[g].value.size() / (gate_rows * s.gate_heads);
    a.g = buffer<T>(c.input[g].value.size());
    for (index_t i = 0; i < a.g.size(); ++i)
      a.g[i] = c.gate == attention_case::gate_source::slopes ? -get(g, i) : get(g, i);
    a.in.g_rhk = view3<T const>(a.g.data(), {gate_rows, s.gate_heads, channels});
    if (c.constant_gate()) a.in.g_rhk.stride[0] = 0;
  }
  if (c.input[sink].value.size() > 0) {
    a.sink = buffer<T>(s.heads);
    for (index_t h = 0; h < s.heads; ++h) a.sink[h] = get(sink, h);
    a.in.sink_h = view1<T const>(a.sink.data(), {s.heads});
  }
  if (c.input[s0].value.size() > 0) {
    index_t const count = s.seq.count(), held = s.key_dim, channels = a.in.g_rhk ? a.in.g_rhk.extent[2] : 1;
    a.past_length.assign(std::size_t(count), held);
    a.past_k = buffer<T>(count * held * s.key_heads * s.key_dim);
    a.past_v = buffer<T>(count * held * s.value_heads * s.value_dim);
    a.past_g = buffer<T>(count * held * s.gate_heads * channels);  // nothing is forgotten before the first row
    view4<T> const keys(a.past_k.data(), {count, held, s.key_heads, s.key_dim});
    view4<T> const values(a.past_v.data(), {count, held, s.value_heads, s.value_dim});
    for (index_t n = 0; n < count; ++n)
      for (index_t j = 0; j < held; ++j) {
        for (index_t h = 0; h < s.key_heads; ++h) keys(n, j, h, j) = T(1);
        for (index_t h = 0; h < s.value_heads; ++h)
          for (index_t x = 0; x < s.value_dim; ++x)
            values(n, j, h, x) = get(s0, ((n * s.value_heads + h) * held + j) * s.value_dim + x);
      }
    a.in.past_k_nlhk = keys;
    a.in.past_v_nlhv = values;
    a.in.past_g_nlhk = view4<T>(a.past_g.data(), {count, held, s.gate_heads, channels});
    a.in.past_length = a.past_length.data();
  }
  return a;
}

template <class T>
attention_arrays<T> arrays_of(attention_case const& c) {
  return arrays_of<T>(c, [&](std::size_t part, index_t i) { return T(c.input[part].value[i]); });
}

namespace detail {

inline void read_selector(attention_case& a, golden_case const& c) {
  auto& s = a.selector;
  auto& knobs = a.shape.knobs;
  auto const pick = [&](char const* key, auto& to, auto const&... options) {
    bool found = false;
    ((c.text(key) == options.first ? (to = options.second, found = true) : false), ...);
    if (!found)
      throw file_error("seqmix tests: golden case " + c.name() + " has unknown " + key + " " + c.text(key));
  };
  knobs.temperature = c.number("temperature", 1.0);
  if (c.op() == "top1_element") {
    using selectors::top1_gradient;
    s.weights = row_weights::top1;
    s.output = c.text("forward") == "weighted" ? selectors::top1_output::weighted : selectors::top1_output::hard;
    pick("backward", s.surrogate, std::pair("straight_through", top1_gradient::straight_through),
         std::pair("straight_through_output", top1_gradient::straight_through_output),
         std::pair("selected_weight", top1_gradient::selected_weight), std::pair("none", top1_gradient::none));
    knobs.temperature = c.number("temperature_backward", 1.0);
    knobs.forward_temperature = c.number("temperature_forward", 1.0);
    knobs.hard_fraction = c.number("hard_fraction", 1.0);
  } else if (c.op() == "top1_chunk") {
    pick("visible", s.visible, std::pair("own_plus_top1", visible_keys::own_plus_top1),
         std::pair("exactly_one", visible_keys::exactly_one),
         std::pair("window_plus_top1", visible_keys::window_plus_top1));
    pick("score", s.score, std::pair("mean_key", chunk_score::mean_key),
         std::pair("mean_key_prefix", chunk_score::mean_key_prefix),
         std::pair("exact_mass", chunk_score::exact_mass), std::pair("exact_max", chunk_score::exact_max));
    pick("gradient", s.gradient, std::pair("index_constant", chunk_gradient::index_constant),
         std::pair("chunk_straight_through", chunk_gradient::chunk_straight_through),
         std::pair("gated", chunk_gradient::gated));
    if (c.text("selector_probability") == "softmax over candidates of the chunk score r_c")
      s.probability = chunk_probability::score;
    a.shape.select.chunk = index_t(c.number("chunk_size", 0));
    a.shape.select.window = index_t(c.number("window", 0));
    a.shape.select.shared_choice = c.text("choice") == "group";
  } else if (c.op() == "linear_attn" || c.op() == "retention" || c.op() == "simple_gla") {
    s.weights = row_weights::linear;
  } else if (c.op() == "moba") {
    a.shape.select.chunk = index_t(c.number("moba_chunk_size", 0));
    a.shape.select.top_k = index_t(c.number("moba_topk", 0)) - 1;  // which counts the own chunk
  } else if (c.params().contains("window_size") && !c.params()["window_size"].is_null()) {
    s.visible = visible_keys::window;
    a.shape.select.window = index_t(c.number("window_size", 0));
  }
}

}  // namespace detail

/// Any case of ops/attn_*, forgetting_attn*, linear_attn*, retention*, simple_gla*, moba and of top1/.
inline attention_case load_attention_case(std::string const& path) {
  golden_case const c(path);
  attention_case a;
  a.name = c.name();
  bool const head_first = c.text("layout").find("[B,H,T") != std::string::npos;
  auto const stored = [&](char const* name) { return head_first ? token_first(c[name]) : c[name].clone(); };
  auto const q = stored("q"), v = stored("v");
  auto& s = a.shape;
  std::size_t const rows = q.shape.size() - 3;  // [B,T,H,K], or [R,H,K] of packed sequences
  a.length = q.extent(rows);
  s.heads = q.extent(rows + 1);
  s.key_dim = q.extent(rows + 2);
  s.value_heads = v.extent(rows + 1);
  s.value_dim = v.extent(rows + 2);
  s.key_heads = s.value_heads;
  s.gate_heads = s.heads;
  s.scale = c.number("scale", 1.0);
  s.seq = sequences::batch(rows == 0 ? 1 : q.extent(0), a.length);
  if (c.has("cu_seqlens")) {
    for (double x : c["cu_seqlens"].data) a.offsets.push_back(index_t(x));
    s.seq = sequences::packed(a.offsets);
  }
  detail::read_selector(a, c);

  auto const put = [&](attention_case::part part, std::string const& name) {
    a.input[part].value = stored(name.c_str()).converted<double>();
    if (c.has("grad_" + name)) a.input[part].gradient = stored(("grad_" + name).c_str());
  };
  put(attention_case::q, "q");
  put(attention_case::v, "v");
  put(attention_case::k, c.has("key_const") ? "key_const" : "k");
  if (c.has("key_const"))
    a.keys = c.text("keys") == "position" ? attention_case::key_source::positions : attention_case::key_source::one;
  if (c.has("slopes")) {
    a.gate = attention_case::gate_source::slopes;
    put(attention_case::g, "slopes");
  }
  if (c.has("g")) {
    a.gate = attention_case::gate_source::tokens;
    put(attention_case::g, "g");
  }
  if (c.op() == "retention") {
    a.gate = attention_case::gate_source::log_decays;
    a.input[attention_case::g].value = buffer<double>(s.heads);
    for (index_t h = 0; h < s.heads; ++h)
      a.input[attention_case::g].value[h] = std::log1p(-std::exp2(-5.0 - double(h)));
  }
  if (c.has("S0")) put(attention_case::s0, "S0");
  if (c.has("sink")) put(attention_case::sink, "sink");
  a.o = stored("o");
  a.cot_o = stored("cot_o").converted<double>();
  if (c.has("cot_S")) {
    a.state = c["S"].clone();
    a.cot_state = c.converted<double>("cot_S");
  }
  if (c.has("lse")) a.lse = c["lse"].clone();
  for (auto const* name : {"chunk", "index_in_sequence", "index"})
    if (c.has(name) && a.choice.empty())
      for (double x : c[name].data) a.choice.push_back(index_t(x));
  return a;
}

/// Sizes of a random case.
struct random_case_size {
  index_t batch = 1, length = 19, heads = 2, key_heads = 2, key_dim = 4, value_dim = 3;
};

/// Normal q, k, v and cotangent, scale 1/sqrt(K), no gate.
inline attention_case random_attention_case(std::uint64_t seed, random_case_size const& size = {}) {
  random_numbers random(seed);
  attention_case a;
  a.name = "random case " + std::to_string(seed);
  a.length = size.length;
  auto& s = a.shape;
  s.seq = sequences::batch(size.batch, size.length);
  s.heads = s.gate_heads = size.heads;
  s.key_heads = s.value_heads = size.key_heads;
  s.key_dim = size.key_dim;
  s.value_dim = size.value_dim;
  s.scale = 1.0 / std::sqrt(double(size.key_dim));
  index_t const rows = a.rows();
  a.input[attention_case::q].value = random.normals(rows * s.heads * s.key_dim);
  a.input[attention_case::k].value = random.normals(rows * s.key_heads * s.key_dim);
  a.input[attention_case::v].value = random.normals(rows * s.value_heads * s.value_dim);
  a.cot_o = random.normals(rows * s.heads * s.value_dim);
  return a;
}

/// Log-decays per token, drawn from (-size, 0).
inline void add_token_gate(attention_case& c, index_t gate_heads, std::uint64_t seed, double size = 0.5) {
  random_numbers random(seed);
  c.gate = attention_case::gate_source::tokens;
  c.shape.gate_heads = gate_heads;
  c.input[attention_case::g].value = buffer<double>(c.rows() * gate_heads);
  for (auto& g : c.input[attention_case::g].value) g = -random.uniform(0, size);
}
inline void add_constant_gate(attention_case& c, index_t gate_heads) {
  c.gate = attention_case::gate_source::log_decays;
  c.shape.gate_heads = gate_heads;
  c.input[attention_case::g].value = buffer<double>(gate_heads);
  for (index_t h = 0; h < gate_heads; ++h) c.input[attention_case::g].value[h] = -0.05 * double(h + 1);
}
inline void add_sink(attention_case& c, std::uint64_t seed) {
  random_numbers random(seed);
  c.input[attention_case::sink].value = random.normals(c.shape.heads);
}

/// The types behind a request whose `visible` is all or window: visit.template operator()<Which, How>().
template <class Visit>
auto with_element_selector(selector_request const& s, Visit const& visit) {
  using namespace selectors;
  if (s.visible == visible_keys::window) return visit.template operator()<window, softmax>();
  if (s.weights == row_weights::softmax) return visit.template operator()<all, softmax>();
  if (s.weights == row_weights::linear) return visit.template operator()<all, linear>();
  auto const with_output = [&]<top1_output Output>() {
    if constexpr (Output == top1_output::weighted)
      if (s.surrogate == top1_gradient::selected_weight)
        return visit.template operator()<all, top1<Output, top1_gradient::selected_weight>>();
    if (s.surrogate == top1_gradient::straight_through_output)
      return visit.template operator()<all, top1<Output, top1_gradient::straight_through_output>>();
    if (s.surrogate == top1_gradient::none)
      return visit.template operator()<all, top1<Output, top1_gradient::none>>();
    return visit.template operator()<all, top1<Output, top1_gradient::straight_through>>();
  };
  return s.output == top1_output::hard ? with_output.template operator()<top1_output::hard>()
                                       : with_output.template operator()<top1_output::weighted>();
}

/// The types behind a request for a routed selector.
template <class Visit>
auto with_routed_selector(selector_request const& s, Visit const& visit) {
  using namespace selectors;
  auto const with_gradient = [&]<chunk_score Score, chunk_gradient Gradient, chunk_probability Probability>() {
    if (s.visible == visible_keys::window_plus_top1)
      return visit.template operator()<window_plus_top1<Score, Gradient, Probability>, softmax>();
    if (s.visible == visible_keys::exactly_one) {
      if constexpr (Score != chunk_score::mean_key)
        return visit.template operator()<exactly_one<Score, Gradient, Probability>, softmax>();
      throw option_error("seqmix tests: exactly_one with mean_key does not exist; ask for mean_key_prefix");
    }
    return visit.template operator()<own_plus_top1<Score, Gradient, Probability>, softmax>();
  };
  auto const with_score = [&]<chunk_score Score>() {
    using enum chunk_gradient;
    if (s.gradient == gated) return with_gradient.template operator()<Score, gated, chunk_probability::mass>();
    if (s.gradient == index_constant)
      return with_gradient.template operator()<Score, index_constant, chunk_probability::mass>();
    if (s.probability == chunk_probability::score)
      return with_gradient.template operator()<Score, chunk_straight_through, chunk_probability::score>();
    return with_gradient.template operator()<Score, chunk_straight_through, chunk_probability::mass>();
  };
  switch (s.score) {
  case chunk_score::mean_key:
    return with_score.template operator()<chunk_score::mean_key>();
  case chunk_score::mean_key_prefix:
    return with_score.template operator()<chunk_score::mean_key_prefix>();
  case chunk_score::exact_mass:
    return with_score.template operator()<chunk_score::exact_mass>();
  case chunk_score::exact_max:
    break;
  }
  return with_score.template operator()<chunk_score::exact_max>();
}

}  // namespace seqmix::testing
