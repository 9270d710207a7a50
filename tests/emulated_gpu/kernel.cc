// A kernel's call, and the registration of all kernels: registrations.inc tells their dtypes and
// their arguments in host memory.

#include "kernel.h"
#include "tensorflow/core/framework/kernel_def.pb.h"

namespace emulated_gpu {

// ---- A call ----

namespace {

// Such a kernel computes at once, as TensorFlow's kernels for int32 do on GPUs.
bool has_results_on_host(tensorflow::OpKernelContext* context) {
  for (int i = 0; i < context->num_outputs(); ++i) {
    if (context->output_memory_type(i) != tensorflow::HOST_MEMORY) return false;
  }
  return context->num_outputs() > 0;
}

SP_Stream stream_of(TF_OpKernelContext* context) {
  TF_Status* status = TF_NewStatus();
  SP_Stream stream = TF_GetStream(context, status);
  TF_DeleteStatus(status);
  return stream;
}

}  // namespace

Call::Call(TF_OpKernelContext* c_context, Kernel& kernel)
    : context(reinterpret_cast<tensorflow::OpKernelContext*>(c_context)),
      def(kernel.def),
      kernel_(kernel),
      stream_(stream_of(c_context)),
      device_(device_of_stream(stream_)),
      computes_on_host_(has_results_on_host(context)) {}

void Call::fail(const std::string& why) {
  fail(absl::InvalidArgumentError(def.op() + " " + def.name() + ": " + why));
}

View Call::checked(View view, bool is_on_host, const char* what) {
  if (view.size == 0) return view;
  int wanted = is_on_host ? HOST : device_;
  int found = device_of_memory(view.data);
  if (found == wanted) return view;
  std::string where = found == HOST ? "host memory" : "another GPU's memory";
  std::string fault = def.op() + ": " + what + " in " + where;
  count_fault(fault);
  fail(absl::InternalError("an illegal memory access: " + fault + ", " + def.name()));
  return view;
}

View Call::input(int i) {
  bool is_on_host = context->input_memory_type(i) == tensorflow::HOST_MEMORY;
  return checked(View(context->input(i)), is_on_host, "an input");
}

std::vector<View> Call::inputs(int first, int count) {
  std::vector<View> views;
  for (int i = 0; i < count; ++i) views.push_back(input(first + i));
  return views;
}

View Call::output(int i, const Dims& dims, const std::vector<int>& reuse) {
  tensorflow::TensorShape shape;
  for (int64_t dim : dims) shape.AddDim(dim);
  tensorflow::Tensor* tensor = nullptr;
  int reused = -1;
  absl::Status status =
      context->forward_input_or_allocate_output(reuse, i, shape, &tensor, &reused);
  if (!status.ok()) {
    fail(status);
    return View();
  }
  bool is_on_host = context->output_memory_type(i) == tensorflow::HOST_MEMORY;
  View view = checked(View(*tensor), is_on_host, "an output");
  if (reused < 0) unwritten_.push_back(view);
  return view;
}

Dims Call::host_integers(int i) {
  View view = input(i);
  Dims values(view.size);
  for (int64_t n = 0; n < view.size; ++n) values[n] = integer_at(view, n);
  return values;
}

int Call::axis(int64_t axis, size_t rank) {
  bool exists = -int64_t(rank) <= axis && axis < int64_t(rank);
  if (!exists) fail("there is no axis " + std::to_string(axis));
  return axis < 0 ? axis + rank : axis;
}

void Call::run(Work work) {
  if (!ok()) return;
  count_kernel(computes_on_host_ ? HOST : device_, def.op());
  if (computes_on_host_) return work();
  if (is_timed()) {
    if (kernels_ == 0) return;
    double named = named_seconds();
    bool is_of_the_model = def.op() == "Maximum" && named >= 0;
    launch(stream_, launches_, is_of_the_model ? host_seconds() : 0);
    double memory = named >= 0 ? 0 : memory_seconds();
    double seconds = named >= 0 ? named : launch_seconds() + memory;
    return queue_kernel_time(stream_, seconds, memory, def.op() + " " + def.name());
  }
  // TensorFlow's allocator hands memory out again, with an old value that may look right: so an
  // output is NaN from the kernel's turn on until the kernel has run.
  auto poison = [outputs = std::move(unwritten_)] {
    for (const View& output : outputs) std::memset(output.data, 0xFF, output.bytes);
  };
  unwritten_.clear();
  enqueue(stream_, poison, std::move(work));
}

// TensorFlow joins and cuts up to 15 tensors by a launch for each of them. For 16 and more it makes
// two copies of pointers, and one launch.
void Call::launch_for_each(size_t parts) { launches_ = kernels_ = parts < 16 ? parts : 3; }

void Call::copy(const View& from, const View& to) {
  if (is_timed()) return;
  enqueue(stream_, nullptr, [=] { std::memcpy(to.data, from.data, from.bytes); });
}

void Call::wait() const {
  if (!computes_on_host_) wait_for(stream_);
}

// The time of a kernel in timed mode, if its name has it: `…burn_270.5…` says 270.5 µs; else -1.
// Scopes do not count, because an all-reduce may name its ops after gradients.
double Call::named_seconds() const {
  std::string own = def.name().substr(def.name().rfind('/') + 1);
  size_t at = own.find("burn_");
  return at == std::string::npos ? -1 : std::atof(own.c_str() + at + 5) * 1e-6;
}

// Other kernels take the time of their launches and of their bytes.
double Call::launch_seconds() const {
  static const double launch = number_option("KERNEL_US", 8) * 1e-6;
  return kernels_ * launch;
}

double Call::memory_seconds() const {
  double bytes = 0;
  for (int i = 0; i < context->num_inputs(); ++i) {
    if (context->input_memory_type(i) == tensorflow::HOST_MEMORY) continue;
    bytes += context->input(i).TotalBytes();
  }
  for (int i = 0; i < context->num_outputs(); ++i) {
    bool is_on_host = context->output_memory_type(i) == tensorflow::HOST_MEMORY;
    const tensorflow::Tensor* output = context->mutable_output(i);
    if (output && !is_on_host) bytes += output->TotalBytes();
  }
  static const double bytes_per_second = number_option("MEMORY_GBS", 700) * 1e9;
  return bytes / bytes_per_second;
}

// ---- Registration ----

namespace {

// Kernels of an op, one for each combination of dtypes.
struct Registration {
  const char* op;
  std::vector<const char*> host_arguments;
  std::vector<std::pair<const char*, std::vector<const char*>>> dtypes;  // by attribute
};

const std::vector<Registration>& registrations() {
  static const auto& all = *new std::vector<Registration>{
#include "registrations.inc"
  };
  return all;
}

const Bodies& bodies() {
  static const auto& all = *[] {
    auto bodies = new Bodies;
    add_math_bodies(*bodies);
    add_array_bodies(*bodies);
    add_variable_bodies(*bodies);
    return bodies;
  }();
  return all;
}

void* create_kernel(TF_OpKernelConstruction* c_construction) {
  auto construction = reinterpret_cast<tensorflow::OpKernelConstruction*>(c_construction);
  const tensorflow::NodeDef& def = construction->def();
  return new Kernel{bodies().at(def.op()), def};
}

void run_kernel(void* kernel, TF_OpKernelContext* context) {
  auto& known = *static_cast<Kernel*>(kernel);
  Call call(context, known);
  known.body(call);
}

void delete_kernel(void* kernel) { delete static_cast<Kernel*>(kernel); }

using Constraints = std::map<std::string, DataType>;

// TensorFlow's builds without CUDA have a few kernels for GPUs, too.
bool tensorflow_has(const char* op, const Constraints& constraints) {
  const tensorflow::KernelList kernels = tensorflow::GetRegisteredKernelsForOp(op);
  for (const tensorflow::KernelDef& kernel : kernels.kernel()) {
    if (kernel.device_type() != tensorflow::DEVICE_GPU) continue;
    Constraints found;
    for (const auto& constraint : kernel.constraint()) {
      found[constraint.name()] = constraint.allowed_values().list().type(0);
    }
    if (found == constraints) return true;
  }
  return false;
}

void register_kernel(const Registration& wanted, const Constraints& constraints) {
  if (tensorflow_has(wanted.op, constraints)) return;
  TF_Status* status = TF_NewStatus();
  auto* builder =
      TF_NewKernelBuilder(wanted.op, "GPU", create_kernel, run_kernel, delete_kernel);
  for (const auto& [attribute, dtype] : constraints) {
    TF_KernelBuilder_TypeConstraint(builder, attribute.c_str(), TF_DataType(dtype), status);
  }
  for (const char* argument : wanted.host_arguments) {
    TF_KernelBuilder_HostMemory(builder, argument);
  }
  TF_RegisterKernelBuilder(wanted.op, builder, status);
  CHECK_EQ(TF_GetCode(status), TF_OK) << wanted.op << ": " << TF_Message(status);
  TF_DeleteStatus(status);
}

void register_combinations(const Registration& wanted, Constraints chosen) {
  if (chosen.size() == wanted.dtypes.size()) return register_kernel(wanted, chosen);
  const auto& [attribute, dtypes] = wanted.dtypes[chosen.size()];
  for (const char* name : dtypes) {
    CHECK(tensorflow::DataTypeFromString(name, &chosen[attribute])) << name;
    register_combinations(wanted, chosen);
  }
}

}  // namespace
}  // namespace emulated_gpu

extern "C" __attribute__((visibility("default"))) void TF_InitKernel() {
  using namespace emulated_gpu;
  for (const Registration& wanted : registrations()) {
    CHECK(bodies().count(wanted.op)) << wanted.op << " has no body";
    register_combinations(wanted, {});
  }
}
