#include <doctest/doctest.h>

#include "support/models.hpp"
#include <seqmix/layers/projection.hpp>
#include <seqmix/layers/swiglu.hpp>

using namespace seqmix;

namespace {

/// The first layer writes a projection of its input to the stream, later ones add the stream times a gain to
/// theirs; all of them multiply by one shared matrix. What RWKV-7's first value and HGRN's bounds need, and nothing
/// more.
class echo {
 public:
  struct options {};
  static std::string name() { return "echo"; }

  echo(options const&, index_t d_model, parameter_room room) : first_(room.position().index == 0), width_(d_model) {
    auto own = room.inner("echo");
    if (first_)
      own_.add(own, "write", d_model, d_model, init::normal(0.5));
    else
      gain_ = own.vector("gain", d_model, init::normal(0.5));
    shared_ = own.shared_matrix("echo", d_model, d_model, init::normal(0.5), true);
  }
  index_t stream_width() const { return width_; }

  template <class T>
  struct state {
    void clear() {}
  };
  template <class T, class Device>
  state<T> carve_state(arena&, pass<Device, T> const&) const {
    return {};
  }
  index_t state_elements(index_t, index_t) const { return 0; }
  template <class T>
  struct saved {};
  template <class T, class Device>
  saved<T> carve_saved(arena&, pass<Device, T> const&) const {
    return {};
  }

  template <class Device, class T>
  void forward(pass<Device, T> const& run, view2<same<T> const> x, view2<same<T>> y, saved<same<T>> const&,
               state<same<T>> const*, state<same<T>>*, arena& ws) const {
    if (first_) own_.forward(run.device, run.parameters, x, run.stream_rc, ws);
    kernels::detail::add_linear(run.device, x, x, shared_.of(run.parameters), y, ws);
    if (first_) return;
    T const* const gain = gain_.data(run.parameters);
    parallel_for(run.device, run.rows(), [&](index_t r, int) {
      for (index_t d = 0; d < width_; ++d) y(r, d) += gain[d] * run.stream_rc(r, d);
    });
  }

  template <class Device, class T>
  void backward(pass<Device, T> const& run, view2<same<T> const> x, saved<same<T>> const&, view2<same<T> const> dy,
                view2<same<T>> dx, state<same<T>> const*, state<same<T>> const*, state<same<T>>*, same<T>* d_base,
                arena& ws) const {
    arena_scope const scope(ws);
    auto const through = ws.take_view<T, 2>({run.rows(), width_});
    kernels::linear_backward_weight(run.device, view2<T const>(dy), x, shared_.of(d_base), ws);
    if (first_) {
      own_.backward(run.device, run.parameters, x, run.d_stream_rc, through, d_base, ws);
    } else if (!run.device.dry) {
      T const* const gain = gain_.data(run.parameters);
      for (index_t r = 0; r < run.rows(); ++r)
        for (index_t d = 0; d < width_; ++d) {
          gain_.data(d_base)[d] += dy(r, d) * run.stream_rc(r, d);
          run.d_stream_rc(r, d) += dy(r, d) * gain[d];
        }
    }
    kernels::detail::copy(run.device, view2<T const>(dy), dx);
    kernels::linear_backward_input(run.device, view2<T const>(dy), shared_.of(run.parameters), dx, true, ws);
    if (first_) kernels::detail::copy_or_add(run.device, view2<T const>(through), dx, true);
  }

 private:
  bool first_;
  index_t width_;
  projection own_;
  weight gain_, shared_;
};

}  // namespace

DOCTEST_TEST_CASE("a value written by the first layer and a shared matrix: gradients as on dual numbers") {
  seqmix::testing::check_model_gradients<echo>({});
}

DOCTEST_TEST_CASE("a stream passes through a block, and shared tensors exist once") {
  using in_a_block = block<echo, swiglu<>>;
  seqmix::testing::check_model_gradients<in_a_block>({echo::options{}, swiglu_options{.width = 8}});
  language_model<pattern<echo>> const model({.vocabulary = 5, .d_model = 4, .layers = 3});
  int shared = 0;
  for (auto const& p : model.parameters().all()) shared += p.name == "shared.echo";
  DOCTEST_CHECK(shared == 1);
}
