#pragma once

#include <seqmix/kernels/cpu/rows.hpp>
#include <seqmix/layers/block.hpp>

namespace seqmix::inline v0 {

/// x + sum of branches that all read x, GPT-NeoX's and GPT-J's way of joining attention and MLP. The branches are
/// layers without a residual path of their own. Source: Black et al. (arXiv 2204.06745), section 2.1.
template <class... Branches>
class parallel_block {
  static_assert(sizeof...(Branches) > 0, "seqmix parallel_block: name at least one branch");
  template <class Device, class T>
  static constexpr bool runs_on = (layer_detail::has_forward_on<Branches, Device, T> && ...);
  template <class Device, class T>
  static constexpr bool trains_on = (layer_detail::has_backward_on<Branches, Device, T> && ...);

 public:
  using options = std::tuple<typename Branches::options...>;
  static std::string name() {
    std::string text;
    ((text += (text.empty() ? "parallel[" : "+") + Branches::name()), ...);
    return text + "]";
  }
  parallel_block(options const& o, index_t d_model, parameter_room room)
      : parallel_block(o, d_model, room, std::index_sequence_for<Branches...>{}) {}

  template <class T>
  struct state {
    std::tuple<typename Branches::template state<T>...> part;
    void clear() {
      std::apply([](auto&... s) { (s.clear(), ...); }, part);
    }
  };
  template <class T, class Device>
  state<T> carve_state(arena& a, pass<Device, T> const& run) const {
    return std::apply([&](auto const&... l) { return state<T>{std::tuple{l.template carve_state<T>(a, run)...}}; },
                      branches_);
  }
  std::tuple<Branches...> const& parts() const noexcept { return branches_; }
  index_t stream_width() const {
    index_t width = 0;
    auto const widen = [&](auto const& l) {
      if constexpr (requires { l.stream_width(); }) width = (std::max)(width, l.stream_width());
    };
    std::apply([&](auto const&... l) { (widen(l), ...); }, branches_);
    return width;
  }
  index_t state_elements(index_t sequences_count, index_t capacity) const {
    return std::apply([&](auto const&... l) { return (l.state_elements(sequences_count, capacity) + ...); },
                      branches_);
  }

  template <class T>
  struct saved {
    std::tuple<typename Branches::template saved<T>...> part;
  };
  template <class T, class Device>
  saved<T> carve_saved(arena& a, pass<Device, T> const& run) const {
    return {
        std::apply([&](auto const&... l) { return std::tuple{l.template carve_saved<T>(a, run)...}; }, branches_)};
  }

  template <class Device, class T>
  requires runs_on<Device, T>
  void forward(pass<Device, T> const& run, view2<same<T> const> x_rd, view2<same<T>> y_rd,
               saved<same<T>> const& keep, state<same<T>> const* before, state<same<T>>* after, arena& ws) const {
    arena_scope const scope(ws);
    auto const branch = ws.take_view<T, 2>(y_rd.extent);
    kernels::detail::copy(run.device, x_rd, y_rd);
    each([&]<std::size_t I>(std::integral_constant<std::size_t, I>) {
      std::get<I>(branches_).forward(run, x_rd, branch, std::get<I>(keep.part),
                                     before ? &std::get<I>(before->part) : nullptr,
                                     after ? &std::get<I>(after->part) : nullptr, ws);
      kernels::detail::copy_or_add(run.device, view2<T const>(branch), y_rd, true);
    });
  }
  template <class Device, class T>
  requires trains_on<Device, T>
  void backward(pass<Device, T> const& run, view2<same<T> const> x_rd, saved<same<T>> const& keep,
                view2<same<T> const> dy_rd, view2<same<T>> dx_rd, state<same<T>> const* before,
                state<same<T>> const* d_after, state<same<T>>* d_before, same<T>* d_base, arena& ws) const {
    arena_scope const scope(ws);
    auto const branch = ws.take_view<T, 2>(dx_rd.extent);
    kernels::detail::copy(run.device, dy_rd, dx_rd);
    each([&]<std::size_t I>(std::integral_constant<std::size_t, I>) {
      std::get<I>(branches_).backward(run, x_rd, std::get<I>(keep.part), dy_rd, branch,
                                      before ? &std::get<I>(before->part) : nullptr,
                                      d_after ? &std::get<I>(d_after->part) : nullptr,
                                      d_before ? &std::get<I>(d_before->part) : nullptr, d_base, ws);
      kernels::detail::copy_or_add(run.device, view2<T const>(branch), dx_rd, true);
    });
  }

 private:
  template <std::size_t... I>
  parallel_block(options const& o, index_t d_model, parameter_room room, std::index_sequence<I...>)
      : branches_{Branches(std::get<I>(o), d_model, room)...} {}
  template <class F>
  static void each(F const& f) {
    [&]<std::size_t... I>(std::index_sequence<I...>) { (f(std::integral_constant<std::size_t, I>{}), ...); }
    (std::index_sequence_for<Branches...>{});
  }
  std::tuple<Branches...> branches_;
};

}  // namespace seqmix::inline v0
