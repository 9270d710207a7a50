// The wind tunnel: TensorFlow's executor issues copies and sums, and here is how long they take on an emulated machine.
//
// _Send, TensorFlow's op at every edge between devices, gets another kernel: where a GPU's copy would be put on the
// sender's copy stream, it is put on an emulated one, in the order in which the executor dispatches. Its receiver has
// the value when the emulated bytes have passed. TunnelSum follows each sum: it occupies the emulated compute stream, and
// is done at once, as a kernel launch on a GPU is. TunnelGradient hands on a value when the host may issue what reads it.
// TunnelKeep only keeps Grappler from changing what it reads. The emulated host does one thing after another.
//
// Time is emulated. It goes on when TensorFlow has dispatched everything that can be dispatched, so a busy computer
// changes nothing. See README.md.

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <queue>
#include <thread>
#include <tuple>
#include <vector>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/rendezvous.h"
#include "tensorflow/core/framework/shape_inference.h"

using namespace tensorflow;  // NOLINT

namespace {

constexpr double kNever = 1e300;
constexpr int kFirstSize = 8;  // chunk c travels as a tensor of kFirstSize + c elements, which is how it is recognized

struct Copy {
  int number, src, dst;
  double bytes;
  std::function<void()> deliver;
  double not_before = 0;  // when the sums end that sender and receiver had been given at its dispatch
  double start = 0, flows_at = 0, left = 0, rate = 0;
  bool flowing = false;
};

struct Stream {
  std::deque<Copy*> queue;  // in the order of dispatch
  Copy* current = nullptr;
};

struct Pair {
  double limit = 0;         // bytes/s
  std::vector<int> shared;  // ports, uplinks and buses on the way
};

class Machine {
 public:
  // What the machine is, and what a run will dispatch. Called under Lock().
  int devices = 0;
  double latency = 0;  // seconds from a copy's start to its first byte
  double arrival = 0;  // seconds of the host from a copy's end until its receiver has the value
  double dispatch = 0;  // seconds of the host for each op
  double pass = 0;      // seconds of the backward pass, of which the host has queued `backlog` on each tower
  double backlog = 0;
  int towers = 0;
  std::vector<double> gradients;  // when each gradient is there
  std::vector<Pair> pairs;
  std::vector<double> speed;  // of what is shared, bytes/s
  std::vector<int> missing;   // for each copy, then each sum: of how many copies it needs the end before its dispatch
  std::vector<std::vector<int>> dependents;  // of each copy
  std::map<std::tuple<int, int, int>, std::deque<std::pair<int, double>>> known;  // (src, dst, chunk) → number, bytes

  std::unique_lock<std::mutex> Lock() { return std::unique_lock<std::mutex>(mutex_); }

  void Reset() {
    streams_.assign(devices, Stream());
    compute_.assign(devices, 0.0);
    expected_ = std::count(missing.begin(), missing.end(), 0) + gradients.size();
    dispatched_ = 0;
    now_ = flowed_ = free_ = -backlog;
    last_ = 0;
    left_ = backlog;
    end_ = pass;
    issues_ = {};
    arrivals_ = {};
    deliveries_.clear();
    order_.clear();
    ends_.assign(dependents.size(), 0.0);
    if (!started_) {
      started_ = true;
      std::thread([this] { Run(); }).detach();
    }
    changed_.notify_one();
  }

  // The planned copy that a tensor on its way is; nullptr for anything else.
  Copy* Recognize(int src, int dst, int64_t elements) {
    auto lock = Lock();
    auto found = known.find(std::make_tuple(src, dst, static_cast<int>(elements) - kFirstSize));
    if (found == known.end() || found->second.empty()) return nullptr;
    Copy* copy = new Copy;
    std::tie(copy->number, copy->bytes) = found->second.front();
    found->second.pop_front();
    copy->src = src;
    copy->dst = dst;
    return copy;
  }

  void Dispatch(Copy* copy) {
    auto lock = Lock();
    order_.push_back(copy->number);
    Issue([this, copy] {
      copy->not_before = std::max({now_, Free(copy->src), Free(copy->dst)});
      streams_[copy->src].queue.push_back(copy);
    });
  }

  void Sum(int device, double seconds) {
    auto lock = Lock();
    Issue([this, device, seconds] {
      compute_[device] = std::max(now_, Free(device)) + seconds;
      last_ = std::max(last_, compute_[device]);
    });
  }

  // A gradient: `deliver` when the host may issue what reads it, some kernels ahead.
  void Gradient(int number, std::function<void()> deliver) {
    auto lock = Lock();
    ++dispatched_;
    const int event = dependents.size() - gradients.size() + number;
    // of gradients that are there at the same time, the host goes on with that of the first copy in the plan
    const int first = dependents[event].empty() ? 0 : dependents[event][0];
    deliveries_.push_back({event, deliver});
    arrivals_.push({gradients[number] - backlog, first, deliveries_.size() - 1});
    changed_.notify_one();
  }

  double Seconds() {
    auto lock = Lock();
    return std::max(last_, end_);
  }

  int Ends(double* seconds, int most) {
    auto lock = Lock();
    int count = std::min<int>(most, ends_.size());
    std::copy(ends_.begin(), ends_.begin() + count, seconds);
    return count;
  }

  int Order(int* numbers, int most) {
    auto lock = Lock();
    int count = std::min<int>(most, order_.size());
    std::copy(order_.begin(), order_.begin() + count, numbers);
    return count;
  }

 private:
  // One event after another, each as soon as TensorFlow has dispatched all that it can.
  void Run() {
    auto lock = Lock();
    int waited = 0;
    while (true) {
      if (!changed_.wait_for(lock, std::chrono::seconds(5), [this] { return dispatched_ >= expected_ && Busy(); })) {
        if (dispatched_ < expected_ && ++waited == 12) {
          fprintf(stderr, "tunnel: only %d of %d copies and sums were dispatched within a minute\n", dispatched_, expected_);
          _exit(3);
        }
        continue;
      }
      waited = 0;
      for (Stream& stream : streams_) Start(&stream);
      std::vector<std::function<void()>> due;
      now_ = std::max(now_, NextEvent());
      Happen(&due);
      lock.unlock();
      for (auto& deliver : due) deliver();
      lock.lock();
    }
  }

  // When the host gets to an op that it can begin now, and spends its time on it.
  double Dispatched(double now) {
    const double start = std::max(now, free_);
    free_ = start + dispatch;
    if (start < end_) {
      left_ -= dispatch;
      end_ = pass + std::max(0.0, -left_);
    }
    return start;
  }

  void Issue(std::function<void()> issue) {
    issues_.push({Dispatched(now_), issued_++, issue});
    ++dispatched_;
    changed_.notify_one();
  }

  // When a device's compute stream is done with all that is queued there now.
  double Free(int device) const {
    if (device >= towers || now_ >= end_) return compute_[device];
    return std::max(compute_[device], std::min(end_, now_ + backlog));
  }

  bool Busy() const {
    if (!arrivals_.empty() || !issues_.empty()) return true;
    for (const Stream& stream : streams_)
      if (stream.current || !stream.queue.empty()) return true;
    return false;
  }

  void Start(Stream* stream) {
    if (stream->current || stream->queue.empty()) return;
    Copy* copy = stream->current = stream->queue.front();
    stream->queue.pop_front();
    copy->start = std::max(now_, copy->not_before);
    copy->flows_at = copy->start + latency;
  }

  double EndOf(const Copy& copy) const { return copy.rate > 0 ? flowed_ + copy.left / copy.rate : kNever; }

  double NextEvent() const {
    double next = arrivals_.empty() ? kNever : std::get<0>(arrivals_.top());
    if (!issues_.empty()) next = std::min(next, std::get<0>(issues_.top()));
    for (const Stream& stream : streams_)
      if (stream.current) next = std::min(next, stream.current->flowing ? EndOf(*stream.current) : stream.current->flows_at);
    return next;
  }

  void Happen(std::vector<std::function<void()>>* due) {
    for (Stream& stream : streams_)
      if (stream.current && stream.current->flowing) stream.current->left -= stream.current->rate * (now_ - flowed_);
    flowed_ = now_;
    while (!issues_.empty() && std::get<0>(issues_.top()) <= now_) {
      auto issue = std::get<2>(issues_.top());
      issues_.pop();
      issue();
    }
    for (Stream& stream : streams_) Start(&stream);
    while (!arrivals_.empty() && std::get<0>(arrivals_.top()) <= now_) {
      const int first = std::get<1>(arrivals_.top());
      const size_t delivery = std::get<2>(arrivals_.top());
      arrivals_.pop();
      const int gradient = deliveries_[delivery].first - static_cast<int>(dependents.size() - gradients.size());
      if (gradient >= 0 && gradients[gradient] - backlog + end_ - pass > now_ + 1e-12) {
        arrivals_.push({gradients[gradient] - backlog + end_ - pass, first, delivery});  // the host is late
      } else {
        Arrive(deliveries_[delivery], due);
      }
    }
    for (Stream& stream : streams_) {
      Copy* copy = stream.current;
      if (!copy) continue;
      if (copy->flowing && copy->left <= copy->rate * 1e-9) {
        stream.current = nullptr;
        ends_[copy->number] = now_;
        last_ = std::max(last_, now_);
        const double noted = Dispatched(now_ + arrival);
        last_ = std::max(last_, noted);
        if (noted > now_) {
          deliveries_.push_back({copy->number, copy->deliver});
          arrivals_.push({noted, -1, deliveries_.size() - 1});
        } else {
          Arrive({copy->number, copy->deliver}, due);
        }
        delete copy;
        Start(&stream);
      } else if (!copy->flowing && copy->flows_at <= now_) {
        copy->flowing = true;
        copy->left = copy->bytes;
      }
    }
    Share();
  }

  void Arrive(const std::pair<int, std::function<void()>>& delivery, std::vector<std::function<void()>>* due) {
    for (int dependent : dependents[delivery.first])
      if (--missing[dependent] == 0) ++expected_;
    due->push_back(delivery.second);
  }

  // Max-min fair rates: the smallest share is fixed first, what it leaves is divided among the others.
  void Share() {
    std::vector<Copy*> open;
    for (Stream& stream : streams_)
      if (stream.current && stream.current->flowing) open.push_back(stream.current);
    std::vector<double> left = speed;
    while (!open.empty()) {
      std::vector<int> users(left.size(), 0);
      for (Copy* copy : open)
        for (int shared : PairOf(*copy).shared) ++users[shared];
      auto share = [&](Copy* copy) {
        double least = PairOf(*copy).limit;
        for (int shared : PairOf(*copy).shared) least = std::min(least, left[shared] / users[shared]);
        return least;
      };
      double least = kNever;
      for (Copy* copy : open) least = std::min(least, share(copy));
      std::vector<Copy*> fixed, rest;
      for (Copy* copy : open) (share(copy) <= least * (1 + 1e-9) ? fixed : rest).push_back(copy);
      for (Copy* copy : fixed) {
        copy->rate = least;
        for (int shared : PairOf(*copy).shared) left[shared] = std::max(0.0, left[shared] - least);
      }
      open.swap(rest);
    }
  }

  const Pair& PairOf(const Copy& copy) const { return pairs[copy.src * devices + copy.dst]; }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool started_ = false;
  std::vector<Stream> streams_;
  std::vector<double> compute_;  // when each device's compute stream is free
  std::vector<int> order_;       // of dispatch
  std::vector<double> ends_;     // of each copy
  using Arrival = std::tuple<double, int, size_t>;
  std::priority_queue<Arrival, std::vector<Arrival>, std::greater<Arrival>> arrivals_;
  std::vector<std::pair<int, std::function<void()>>> deliveries_;
  using OneIssue = std::tuple<double, int, std::function<void()>>;
  struct Later {
    bool operator()(const OneIssue& a, const OneIssue& b) const {
      return std::make_pair(std::get<0>(a), std::get<1>(a)) > std::make_pair(std::get<0>(b), std::get<1>(b));
    }
  };
  std::priority_queue<OneIssue, std::vector<OneIssue>, Later> issues_;  // what the host has been given, by time
  int expected_ = 0, dispatched_ = 0, issued_ = 0;
  double now_ = 0, flowed_ = 0, last_ = 0;
  double free_ = 0, left_ = 0, end_ = 0;  // of the host: when it has time, its lead, the end of the pass
};

Machine& TheMachine() {
  static Machine* machine = new Machine;
  return *machine;
}

Status SameShape(shape_inference::InferenceContext* context) {
  context->set_output(0, context->input(0));
  return absl::OkStatus();
}

REGISTER_OP("TunnelSum").Input("x: float").Output("y: float").Attr("device_number: int").Attr("seconds: float")
    .SetIsStateful().SetShapeFn(SameShape);
REGISTER_OP("TunnelGradient").Input("x: float").Output("y: float").Attr("number: int").SetIsStateful().SetShapeFn(SameShape);
REGISTER_OP("TunnelKeep").Input("x: float").Output("y: float").SetIsStateful().SetShapeFn(SameShape);

class SendOp : public AsyncOpKernel {
 public:
  explicit SendOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    string sender, receiver, name;
    int64_t incarnation;
    OP_REQUIRES_OK(context, context->GetAttr("send_device", &sender));
    OP_REQUIRES_OK(context, context->GetAttr("recv_device", &receiver));
    OP_REQUIRES_OK(context, context->GetAttr("send_device_incarnation", &incarnation));
    OP_REQUIRES_OK(context, context->GetAttr("tensor_name", &name));
    string key = Rendezvous::CreateKey(sender, static_cast<uint64_t>(incarnation), receiver, name, FrameAndIter(0, 0));
    OP_REQUIRES_OK(context, Rendezvous::ParseKey(key, &key_));
  }

  bool IsExpensive() override { return false; }  // as every kernel of a GPU

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    Rendezvous::Args args;
    args.device_context = context->op_device_context();
    args.alloc_attrs = context->input_alloc_attr(0);
    Tensor value = context->input(0);
    bool dead = context->is_input_dead();
    auto* rendezvous = context->rendezvous();
    auto deliver = [this, context, rendezvous, args, value, dead, done]() {
      context->SetStatus(rendezvous->Send(key_, args, value, dead));
      done();
    };
    int src = key_.src.id, dst = key_.dst.id;
    Copy* copy = value.dtype() == DT_FLOAT && src != dst ? TheMachine().Recognize(src, dst, value.NumElements()) : nullptr;
    if (!copy) return deliver();
    copy->deliver = deliver;
    TheMachine().Dispatch(copy);
  }

 private:
  Rendezvous::ParsedKey key_;
};

class SumOp : public OpKernel {
 public:
  explicit SumOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("device_number", &device_));
    OP_REQUIRES_OK(context, context->GetAttr("seconds", &seconds_));
  }
  bool IsExpensive() override { return false; }
  void Compute(OpKernelContext* context) override {
    context->set_output(0, context->input(0));
    TheMachine().Sum(device_, seconds_);
  }

 private:
  int device_;
  float seconds_;
};

class GradientOp : public AsyncOpKernel {
 public:
  explicit GradientOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("number", &number_));
  }
  bool IsExpensive() override { return false; }
  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    context->set_output(0, context->input(0));
    TheMachine().Gradient(number_, done);
  }

 private:
  int number_;
};

class KeepOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  bool IsExpensive() override { return false; }
  void Compute(OpKernelContext* context) override { context->set_output(0, context->input(0)); }
};

REGISTER_KERNEL_BUILDER(Name("_Send").Device(DEVICE_CPU).Priority(1), SendOp);
REGISTER_KERNEL_BUILDER(Name("TunnelSum").Device(DEVICE_CPU), SumOp);
REGISTER_KERNEL_BUILDER(Name("TunnelGradient").Device(DEVICE_CPU), GradientOp);
REGISTER_KERNEL_BUILDER(Name("TunnelKeep").Device(DEVICE_CPU), KeepOp);

}  // namespace

extern "C" {

// The links, without a backward pass: seconds of latency, arrival and dispatch; limits of devices² pairs; what pair p
// shares is shared[from[p] .. from[p + 1]).
void tunnel_machine(int devices, double latency, double arrival, double dispatch, const double* limits, const int* from,
                    const int* shared, int resources, const double* speed) {
  Machine& machine = TheMachine();
  auto lock = machine.Lock();
  machine.devices = devices;
  machine.latency = latency;
  machine.arrival = arrival;
  machine.dispatch = dispatch;
  machine.pairs.assign(devices * devices, Pair());
  for (int pair = 0; pair < devices * devices; ++pair) {
    machine.pairs[pair].limit = limits[pair];
    machine.pairs[pair].shared.assign(shared + from[pair], shared + from[pair + 1]);
  }
  machine.speed.assign(speed, speed + resources);
  machine.pass = machine.backlog = 0;
  machine.gradients.clear();
}

// The backward pass of the next runs: when each of `count` gradients is there.
void tunnel_pass(int towers, double pass, double backlog, int count, const double* gradients) {
  Machine& machine = TheMachine();
  auto lock = machine.Lock();
  machine.towers = towers;
  machine.pass = pass;
  machine.backlog = backlog;
  machine.gradients.assign(gradients, gradients + count);
}

// The next run: copies as (src, dst, chunk) and bytes; what waits for the end of copy c, and after the copies for a gradient,
// is dependents[from[c] .. from[c + 1]).
void tunnel_run(int copies, int sums, const int* ends, const double* bytes, const int* missing, const int* from,
                const int* dependents) {
  Machine& machine = TheMachine();
  auto lock = machine.Lock();
  machine.known.clear();
  const int events = copies + machine.gradients.size();
  machine.dependents.assign(events, {});
  for (int event = 0; event < events; ++event)
    machine.dependents[event].assign(dependents + from[event], dependents + from[event + 1]);
  for (int copy = 0; copy < copies; ++copy)
    machine.known[std::make_tuple(ends[3 * copy], ends[3 * copy + 1], ends[3 * copy + 2])].push_back({copy, bytes[copy]});
  machine.missing.assign(missing, missing + copies + sums);
  machine.Reset();
}

double tunnel_seconds() { return TheMachine().Seconds(); }

// When each copy of the last run ended.
int tunnel_ends(double* seconds, int most) { return TheMachine().Ends(seconds, most); }

int tunnel_order(int* numbers, int most) { return TheMachine().Order(numbers, most); }
}
