#include <limits>

#include <doctest/doctest.h>

#include "../support/routed_run.hpp"

// The fast kernels of all selectors that choose a chunk per query, against golden vectors and the reference.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using part = attention_case::part;

struct make_functions {
  template <class Which, class How>
  routed_functions operator()() const {
    return routed_functions_of<Which, How>();
  }
};
routed_functions functions_for(selector_request const& s) { return with_routed_selector(s, make_functions{}); }

std::vector<selector_request> all_requests() {
  std::vector<selector_request> all;
  for (auto visible : {visible_keys::own_plus_top1, visible_keys::exactly_one, visible_keys::window_plus_top1})
    for (auto score :
         {chunk_score::mean_key, chunk_score::mean_key_prefix, chunk_score::exact_mass, chunk_score::exact_max})
      for (auto gradient :
           {chunk_gradient::index_constant, chunk_gradient::chunk_straight_through, chunk_gradient::gated})
        for (auto probability : {chunk_probability::mass, chunk_probability::score}) {
          if (visible == visible_keys::exactly_one && score == chunk_score::mean_key) continue;
          if (probability == chunk_probability::score && gradient != chunk_gradient::chunk_straight_through)
            continue;
          selector_request s;
          s.visible = visible;
          s.score = score;
          s.gradient = gradient;
          s.probability = probability;
          all.push_back(s);
        }
  return all;
}
std::string text_of(selector_request const& s) {
  return "visible " + std::to_string(int(s.visible)) + ", score " + std::to_string(int(s.score)) + ", gradient " +
         std::to_string(int(s.gradient)) + ", probability " + std::to_string(int(s.probability));
}

}  // namespace

DOCTEST_TEST_CASE(
    "routed attention on the CPU gives the golden results of Top-1 chunk selection in double and float") {
  auto const cases = golden_cases("top1", "top1_chunk_");
  DOCTEST_REQUIRE(cases.size() == 34);
  for (auto const& path : cases) {
    auto const c = load_attention_case(path);
    auto const f = functions_for(c.selector);
    check_golden<double>(f.of_double, c);
    check_golden<float>(f.of_float, c);
  }
}

DOCTEST_TEST_CASE("routed attention on the CPU agrees with the reference on ragged sizes, forward and backward") {
  std::vector<index_t> lengths;
  for (index_t t = 1; t <= 40; ++t) lengths.push_back(t);
  for (index_t t : {63, 64, 65}) lengths.push_back(t);
  index_t i = 0;
  for (auto const& request : all_requests()) {
    auto const f = functions_for(request);
    for (auto length : lengths) {
      auto c = ragged_case(length, i++);
      DOCTEST_INFO(text_of(request), ", length ", length, ", chunk ", c.shape.select.chunk, ", window ",
                   c.shape.select.window, ", case ", i - 1);
      check_against_reference(f, c, 1);
    }
  }
}

DOCTEST_TEST_CASE(
    "routed attention on the CPU agrees with the reference over several blocks of queries and tiles of keys") {
  index_t i = 0;
  for (auto const& request : all_requests()) {
    auto const f = functions_for(request);
    for (index_t repeat = 0; repeat < 2; ++repeat) {
      auto c = ragged_case(repeat ? 151 : 130, i);
      if (repeat) c.shape.select.chunk = i % 2 ? 70 : 33;
      ++i;
      DOCTEST_INFO(text_of(request), ", chunk ", c.shape.select.chunk, ", window ", c.shape.select.window,
                   ", case ", i - 1);
      check_against_reference(f, c, 2);
    }
  }
}

DOCTEST_TEST_CASE("every routed selector after a past continues the sequence, and hands the past its gradient") {
  index_t i = 0;
  for (auto const& request : all_requests())
    for (index_t held : {1, 7, 20, 66}) {
      auto c = ragged_case(held + 5 + i % 7 * 11, i);
      DOCTEST_INFO(text_of(request), ", past ", held, ", case ", i);
      check_past(functions_for(request), c, held);
      ++i;
    }
}

DOCTEST_TEST_CASE("routed attention token by token makes the same choices as the whole sequence") {
  index_t i = 0;
  for (auto const& request : all_requests()) {
    auto c = ragged_case(41, i++);
    if (i % 2) c.keys = attention_case::key_source::one;  // every score ties
    c.offsets.clear();
    auto const f = functions_for(request).of_double;
    auto const whole = run_case<double>(f, c);
    auto const a = arrays_of<double>(c);
    auto shape = c.shape;
    shape.seq = sequences::batch(1, 1);
    buffer<double> const cot(shape.heads * shape.value_dim);
    std::vector<index_t> choice;
    for (index_t t = 0; t < c.length; ++t) {
      auto const as_past = [&](view3<double const> v) {
        return view4<double const>(v.data, {1, t, v.extent[1], v.extent[2]},
                                   {0, v.stride[0], v.stride[1], v.stride[2]});
      };
      attention_input<double> in;
      in.q_rhk = a.in.q_rhk.slice(0, t, 1);
      in.k_rhk = a.in.k_rhk.slice(0, t, 1);
      in.v_rhv = a.in.v_rhv.slice(0, t, 1);
      in.past_k_nlhk = as_past(a.in.k_rhk);
      in.past_v_nlhv = as_past(a.in.v_rhv);
      if (a.in.g_rhk) in.g_rhk = c.constant_gate() ? a.in.g_rhk : a.in.g_rhk.slice(0, t, 1);
      if (a.in.g_rhk && !c.constant_gate()) in.past_g_nlhk = as_past(a.in.g_rhk);
      in.past_length = &t;
      auto const one = f(shape, in, cot, 1);
      choice.insert(choice.end(), one.choice.begin(), one.choice.end());
    }
    DOCTEST_CHECK_MESSAGE(choice == whole.choice, text_of(request));
  }
}

DOCTEST_TEST_CASE("equal keys tie wherever they stand, and the first chunk wins, in float too") {
  for (index_t chunk : {1, 3, 5, 16, 37, 100})
    for (auto const& request : all_requests()) {
      auto c = random_attention_case(5, {.length = 230, .heads = 2, .key_heads = 1, .key_dim = 5, .value_dim = 3});
      c.shape.select.chunk = chunk;
      c.shape.select.window = 4;
      c.keys = attention_case::key_source::one;
      // The partial own chunk has less mass, and a rounded sum may exceed its prefix's: no tie by definition.
      if (request.visible == visible_keys::exactly_one && request.score != chunk_score::exact_max) continue;
      if (request.gradient != chunk_gradient::index_constant) continue;
      auto const f = functions_for(request);
      auto const wrong = [&](std::vector<index_t> const& choice) {
        index_t count = 0;
        for (index_t i = 0; i < index_t(choice.size()); ++i) {
          bool const none = request.visible != visible_keys::exactly_one && i / c.shape.heads < chunk;
          count += choice[std::size_t(i)] != (none ? -1 : 0);
        }
        return count;
      };
      DOCTEST_CHECK_MESSAGE(wrong(run_case<double>(f.of_double, c).choice) == 0, text_of(request), ", chunk ",
                            chunk);
      DOCTEST_CHECK_MESSAGE(wrong(run_case<float>(f.of_float, c).choice) == 0, text_of(request), ", chunk ", chunk);
    }
}

DOCTEST_TEST_CASE("routed attention has the same bits for one, two and three threads") {
  index_t i = 0;
  for (auto const& request : all_requests()) {
    auto c = ragged_case(70, i++);
    if (!c.offsets.empty()) c.shape.seq = sequences::packed(c.offsets);
    auto const f = functions_for(request).of_float;
    auto const one = run_case<float>(f, c, 1);
    for (int threads : {2, 3}) {
      auto const more = run_case<float>(f, c, threads);
      DOCTEST_CHECK(same_bits(one.o, more.o));
      DOCTEST_CHECK(one.choice == more.choice);
      DOCTEST_CHECK(same_bits(one.lse, more.lse));
      for (std::size_t which = 0; which < attention_case::parts; ++which)
        DOCTEST_CHECK_MESSAGE(same_bits(one.gradient[which], more.gradient[which]), text_of(request), ", input ",
                              which);
    }
  }
}

DOCTEST_TEST_CASE(
    "a NaN key makes those rows of routed attention NaN that see it or may choose its chunk, and no others") {
  constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();
  index_t i = 0;
  for (auto const& request : all_requests()) {
    auto c = random_attention_case(std::uint64_t(++i), {.length = 40, .heads = 4, .key_heads = 2});
    c.shape.select.chunk = 5;
    c.shape.select.window = 3;
    c.shape.select.shared_choice = i % 2;
    c.input[part::k].value[12 * c.shape.key_heads * c.shape.key_dim] = not_a_number;
    auto const f = functions_for(request);
    auto const expected = run<double>(f.reference, c);
    auto const found = run_case<double>(f.of_double, c);
    bool same = true;
    for (index_t x = 0; x < found.o.size(); ++x)
      same = same &&
             (std::isnan(expected.o[x]) ? std::isnan(found.o[x]) : std::abs(expected.o[x] - found.o[x]) <= 1e-12);
    DOCTEST_CHECK_MESSAGE(same, text_of(request));
  }
}

DOCTEST_TEST_CASE("routed attention keeps a gate of -inf finite, as the reference does") {
  index_t i = 0;
  for (auto const& request : all_requests()) {
    auto c = random_attention_case(std::uint64_t(++i), {.length = 30, .heads = 2, .key_heads = 2});
    c.shape.select.chunk = 4;
    c.shape.select.window = 3;
    add_token_gate(c, 2, 3);
    c.input[part::g].value[11 * 2] = -std::numeric_limits<double>::infinity();
    auto const f = functions_for(request);
    auto const expected = run<double>(f.reference, c);
    auto const found = run_case<double>(f.of_double, c);
    // Sums near 1e4 have 12 digits left behind the point.
    DOCTEST_CHECK_MESSAGE(greatest_difference(found.o, expected.o) <= 1e-10, text_of(request));
    for (auto const& d : found.gradient)
      for (double x : d) DOCTEST_CHECK(std::isfinite(x));
    DOCTEST_CHECK(found.gradient[part::g][11 * 2] == 0);
  }
}
