#include <algorithm>
#include <array>
#include <string>

#include <doctest/doctest.h>

#include <seqmix/gates/gla.hpp>
#include <seqmix/gates/log_sigmoid.hpp>
#include <seqmix/gates/mamba1.hpp>
#include <seqmix/gates/mamba2.hpp>
#include <seqmix/gates/mlstm.hpp>
#include <seqmix/models/cross.hpp>

namespace {

using namespace seqmix;

// [doc:grid]
using some_states = type_list<states::history, states::outer_product, states::delta_rule>;
using some_gates = type_list<gates::none, gates::log_sigmoid, gates::mamba2, gates::gla>;
using some_selectors = type_list<selectors::softmax, selectors::window, selectors::top1_element<>,
                                 selectors::top1_chunk<>, selectors::linear>;
using grid = cross<some_states, some_gates, some_selectors>;  // 24 of 60 cells
// [/doc:grid]

// Of 60 cells: a history takes every selector under none and two gates per head and linear weights under a gate per
// channel, a matrix linear weights alone, the delta rule alike.
constexpr std::array expected{"history-none-softmax",
                              "history-none-window",
                              "history-none-top1_element",
                              "history-none-top1_chunk",
                              "history-none-linear",
                              "history-log_sigmoid-softmax",
                              "history-log_sigmoid-window",
                              "history-log_sigmoid-top1_element",
                              "history-log_sigmoid-top1_chunk",
                              "history-log_sigmoid-linear",
                              "history-mamba2-softmax",
                              "history-mamba2-window",
                              "history-mamba2-top1_element",
                              "history-mamba2-top1_chunk",
                              "history-mamba2-linear",
                              "history-gla-linear",
                              "outer_product-none-linear",
                              "outer_product-log_sigmoid-linear",
                              "outer_product-mamba2-linear",
                              "outer_product-gla-linear",
                              "delta_rule-none-linear",
                              "delta_rule-log_sigmoid-linear",
                              "delta_rule-mamba2-linear",
                              "delta_rule-gla-linear"};
static_assert(grid::size == expected.size());

// Every rule, by a cell that breaks it and no earlier one.
template <class S, class G, class L>
constexpr misfit why = misfit_of<S, G, L>;
using chunk_and_hard = seqmix::select<selectors::own_plus_top1<>, selectors::top1<>>;
static_assert(why<int, gates::none, selectors::softmax> == misfit::not_a_state);
static_assert(why<states::history, int, selectors::softmax> == misfit::not_a_gate);
static_assert(why<states::history, gates::none, int> == misfit::not_a_selector);
static_assert(why<states::history, gates::none, seqmix::select<selectors::all, int>> == misfit::not_a_selector);
static_assert(why<states::history, gates::none, chunk_and_hard> == misfit::hard_choice_in_chunks);
static_assert(why<states::outer_product, gates::none, selectors::softmax> == misfit::choice_from_a_matrix);
static_assert(why<states::elementwise, gates::none, selectors::top1<>> == misfit::choice_from_a_matrix);
using linear_window = seqmix::select<selectors::window, selectors::linear>;
static_assert(why<states::delta_rule, gates::none, linear_window> == misfit::part_of_a_matrix);
static_assert(pairs_v<states::history, gates::none, linear_window>);
// [doc:why]
static_assert(misfit_of<states::history, gates::gla, selectors::softmax> == misfit::channel_bias);
// [/doc:why]
static_assert(why<states::history, gates::mamba1, selectors::top1<>> == misfit::channel_bias);
static_assert(why<states::history, gates::gla, selectors::own_plus_top1<>> == misfit::channel_bias);
static_assert(pairs_v<states::history, gates::mamba1, selectors::linear>);
static_assert(pairs_v<states::history, gates::gla, linear_window>);
static_assert(why<states::history, gates::log_sigmoid, selectors::compressed> == misfit::bias_on_a_mean);
static_assert(pairs_v<states::history, gates::none, selectors::compressed>);
static_assert(why<states::outer_product, gates::mlstm, selectors::linear> == misfit::unstabilised_logarithm);
static_assert(pairs_v<states::mlstm, gates::mlstm, selectors::linear>);
static_assert(why<states::mlstm, gates::gla, selectors::linear> == misfit::channels_of_one_maximum);
static_assert(why<states::mlstm, gates::mamba2, selectors::linear> == misfit::plain_write_to_weights);
static_assert(pairs_v<states::delta_rule, gates::mamba2, selectors::linear>);  // the write scale is the value's

// A decay is data-dependent, constant or absent, each a cell of its own.
// [doc:decay]
using decays = cross<type_list<states::outer_product>, decay_ablation<gates::mamba2>, type_list<selectors::linear>>;
static_assert(decays::size == 3);
// [/doc:decay]
static_assert(cell_name<cell_at<decays, 1>> == "outer_product-constant_form_mamba2-linear");
static_assert(cell_name<cell_at<decays, 2>> == "outer_product-without_decay_mamba2-linear");
static_assert(cell_at<decays, 1>::gate_type::spec.constant() && !cell_at<decays, 2>::gate_type::spec.decays);
static_assert(cell_at<decays, 2>::gate_type::spec.writes);

// An empty product is a list like any other.
static_assert(
    cross<type_list<states::outer_product>, type_list<gates::none>, type_list<selectors::softmax>>::size == 0);
static_assert(cross<type_list<>, type_list<gates::none>, type_list<selectors::softmax>>::size == 0);

// A cell is the mixer that its policies make.
// [doc:at]
static_assert(std::is_same_v<cell_at<grid, find_cell<grid>("history-log_sigmoid-top1_chunk")>,
                             attention<selectors::top1_chunk<>, gates::log_sigmoid>>);
// [/doc:at]
static_assert(std::is_same_v<cell_at<grid, find_cell<grid>("delta_rule-gla-linear")>,
                             recurrence<states::delta_rule, gates::gla>>);
static_assert(find_cell<grid>("delta_rule-gla-softmax") == grid::size);

}  // namespace

DOCTEST_TEST_CASE("cross holds exactly the cells that pair, in order, each under a name of its own") {
  std::size_t at = 0;
  for_each_cell(grid{}, [&]<class M>() { DOCTEST_CHECK(cell_name<M> == expected.at(at++)); });
  DOCTEST_CHECK(at == expected.size());
  auto names = cell_names<grid>;
  std::sort(names.begin(), names.end());
  DOCTEST_CHECK(std::adjacent_find(names.begin(), names.end()) == names.end());
}

DOCTEST_TEST_CASE("readings of one selector have different names in a grid") {
  using enum chunk_score;
  using enum chunk_gradient;
  using namespace selectors;
  using readings =
      cross<type_list<states::history>, type_list<gates::none>,
            type_list<own_plus_top1<>, own_plus_top1<exact_mass>, own_plus_top1<mean_key, gated>,
                      own_plus_top1<exact_max, chunk_straight_through, chunk_probability::score>, own_plus_top_k<>,
                      exactly_one<>, top_k_by_compression<>, top_k_by_compression<forced_chunks::none>, top1<>,
                      top1<top1_output::weighted, top1_gradient::selected_weight>,
                      top1<top1_output::hard, top1_gradient::none>, seqmix::select<selectors::window, top1<>>>>;
  std::array constexpr expected_words{"top1_chunk",
                                      "top1_chunk_exact_mass",
                                      "top1_chunk_gated",
                                      "top1_chunk_exact_max_chunk_straight_through_by_score",
                                      "top_k_chunks",
                                      "exactly_one",
                                      "top_k_by_compression",
                                      "top_k_by_compression_unforced",
                                      "top1_element",
                                      "top1_element_weighted_selected_weight",
                                      "top1_element_index_only",
                                      "window_top1_element"};
  DOCTEST_REQUIRE(readings::size == expected_words.size());
  for (std::size_t i = 0; i < readings::size; ++i)
    DOCTEST_CHECK(cell_names<readings>[i] == "history-none-" + std::string(expected_words[i]));
}

DOCTEST_TEST_CASE("a cell is found by its name; a name that is not there is one sentence with those that are") {
  int found = 0;
  with_cell(decays{}, "outer_product-mamba2-linear", [&]<class M>() {
    static_assert(mixer_type<M>);
    found += std::is_same_v<M, cell_at<decays, 0>> ? 1 : 100;
  });
  DOCTEST_CHECK(found == 1);
  DOCTEST_CHECK_THROWS_WITH_AS(
      with_cell(decays{}, "lstm", []<class>() {}),
      "seqmix cross: no cell is called 'lstm'; the grid has outer_product-mamba2-linear, "
      "outer_product-constant_form_mamba2-linear, outer_product-without_decay_mamba2-linear",
      option_error);
}

DOCTEST_TEST_CASE("every cell of the grid is a mixer with kernels for the CPU") {
  for_each_cell(grid{},
                []<class M>() { static_assert(mixer_on<M, device::cpu> && mixer_on<M, device::cpu, double>); });
}
