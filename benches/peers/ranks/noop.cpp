// A c10d backend that does nothing: it shows torch's own cost before and after a backend's work.
#include <torch/extension.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace {

// Work that is complete from the start.
class Nothing : public c10d::Work {
 public:
  Nothing() { finish(); }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
};

class NoopBackend : public c10d::Backend {
  using Tensors = std::vector<at::Tensor>;
  using Done = c10::intrusive_ptr<c10d::Work>;

 public:
  NoopBackend(int rank, int size) : Backend(rank, size) {}
  const std::string getBackendName() const override { return "noop"; }
  Done allreduce(Tensors &, const c10d::AllreduceOptions &) override { return done(); }
  Done broadcast(Tensors &, const c10d::BroadcastOptions &) override { return done(); }
  Done barrier(const c10d::BarrierOptions &) override { return done(); }
  Done _allgather_base(at::Tensor &, at::Tensor &, const c10d::AllgatherOptions &) override { return done(); }
  Done _reduce_scatter_base(at::Tensor &, at::Tensor &, const c10d::ReduceScatterOptions &) override { return done(); }
  Done alltoall_base(at::Tensor &, at::Tensor &, std::vector<int64_t> &, std::vector<int64_t> &,
                     const c10d::AllToAllOptions &) override {
    return done();
  }

 private:
  static Done done() { return c10::make_intrusive<Nothing>(); }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("make", [](int rank, int size) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<NoopBackend>(rank, size);
  });
}
