// The emulated device: TensorFlow's StreamExecutor C API over host memory, with a thread for each
// stream. README.md lists the options. They are read at first use, not when TensorFlow is imported.

#include "device.h"

#include <errno.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <shared_mutex>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

namespace {

using emulated_gpu::HOST;
using emulated_gpu::Work;
using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

constexpr uint8_t POISON = 0xFF;  // floats of these bytes are NaN, integers -1
constexpr int MOST_DEVICES = 64;

// ---- Options ----

const char* text_option(const std::string& name) {
  const char* text = std::getenv(("EMULATED_GPU_" + name).c_str());
  return text && *text ? text : nullptr;
}

[[noreturn]] void stop(const std::string& why) {
  std::fprintf(stderr, "emulated GPU: %s\n", why.c_str());
  std::_Exit(1);
}

double time_scale() {
  static const double scale = emulated_gpu::number_option("TIMING", 1);
  return scale;
}

Clock::duration scaled(double seconds) {
  std::chrono::duration<double> stretched(seconds * time_scale());
  return std::chrono::duration_cast<Clock::duration>(stretched);
}

// The longest time, in ticks, for which a thread was due to go on and had no core.
std::atomic<int64_t>& longest_gap() {
  static std::atomic<int64_t> ticks{0};
  return ticks;
}

void note_gap(Time due) {
  int64_t gap = (Clock::now() - due).count();
  int64_t longest = longest_gap();
  while (gap > longest && !longest_gap().compare_exchange_weak(longest, gap)) {
  }
}

void sleep_until(Time end) {
  if (end <= Clock::now()) return;
  auto since_boot = end.time_since_epoch();
  int64_t nanoseconds = std::chrono::nanoseconds(since_boot).count();
  timespec at{nanoseconds / 1000000000, nanoseconds % 1000000000};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, nullptr) == EINTR) {
  }
  note_gap(end);
}

// What serves one user at a time, each for some seconds: the launches of a GPU, a thread.
class Turn {
 public:
  // Returns the end of a turn that begins at `from`, or when the one before ends.
  Time take(Time from, double seconds) {
    std::lock_guard<std::mutex> lock(mutex_);
    return free_at_ = std::max(from, free_at_) + scaled(seconds);
  }

 private:
  std::mutex mutex_;
  Time free_at_;
};

// ---- Streams ----

// The time on the emulated machine at which a stream is. A thread wakes up late, and a sum of such
// delays would make all kernels slower: so each item begins when the one before should have ended.
thread_local Time stream_time;
thread_local Time queued_time;  // when the present item was queued

// What is queued on a stream. Each item has a ticket, its number in the queue.
class Queue {
 public:
  using Ticket = uint64_t;

  Ticket push(Work prepare, Work work) {
    std::lock_guard<std::mutex> lock(mutex_);
    items_.push_back({Clock::now(), std::move(prepare), std::move(work)});
    filled_.notify_one();
    return ++last_;
  }

  Ticket last() {
    std::lock_guard<std::mutex> lock(mutex_);
    return last_;
  }

  bool is_done(Ticket ticket) {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_ >= ticket;
  }

  // Blocks until the item is done and returns the time at which it ended.
  Time wait(Ticket ticket) {
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [&] { return done_ >= ticket; });
    return ends_[ticket % ends_.size()];
  }

  void close() {
    std::lock_guard<std::mutex> lock(mutex_);
    is_closing_ = true;
    filled_.notify_one();
  }

  // The stream's thread: one item after the other, until the queue is closed and empty.
  void serve(uint64_t seed) {
    std::mt19937_64 random(seed);
    const uint64_t longest = emulated_gpu::number_option("DELAY_US", 0);
    prctl(PR_SET_TIMERSLACK, 1000UL);  // nanoseconds: the default would add 50 µs to each sleep
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      filled_.wait(lock, [&] { return is_closing_ || !items_.empty(); });
      if (items_.empty()) return;
      Item item = std::move(items_.front());
      items_.pop_front();
      lock.unlock();
      queued_time = item.queued;
      stream_time = std::max(stream_time, queued_time);
      if (item.prepare) item.prepare();
      // One item of four waits. Then streams run ahead of each other, in a quarter of the time.
      if (longest && random() % 4 == 0) sleep_until(delayed(random() % (longest + 1)));
      item.work();
      item = {};  // what the item holds is destroyed without the lock
      lock.lock();
      ++done_;
      ends_[done_ % ends_.size()] = stream_time;
      finished_.notify_all();
    }
  }

 private:
  struct Item {
    Time queued;
    Work prepare;
    Work work;
  };

  static Time delayed(uint64_t microseconds) {
    return Clock::now() + std::chrono::microseconds(microseconds);
  }

  std::mutex mutex_;
  std::condition_variable filled_;
  std::condition_variable finished_;
  std::deque<Item> items_;
  std::array<Time, 1024> ends_;  // of the newest items
  Ticket last_ = 0;
  Ticket done_ = 0;
  bool is_closing_ = false;
};

}  // namespace

// ---- The C API's types ----

struct SP_Stream_st {
  int device;
  std::shared_ptr<Queue> queue;
  std::thread thread;
};

// An event is the ticket of the last item that its stream had when the event was recorded.
struct SP_Event_st {
  struct Mark {
    std::shared_ptr<Queue> queue;
    Queue::Ticket ticket = 0;
  };
  std::mutex mutex;
  Mark mark;

  Mark get() {
    std::lock_guard<std::mutex> lock(mutex);
    return mark;
  }
};

struct SP_Timer_st {
  Time begin;
  Time end;
};

namespace {

// ---- Counters ----
// They are never destroyed, since a stream's thread may outlive main().

struct Copies {
  uint64_t count = 0;
  uint64_t bytes = 0;
};

struct Counters {
  std::mutex mutex;
  std::map<int, std::map<std::string, uint64_t>> kernels;  // by device and op
  std::map<std::pair<int, int>, Copies> copies;            // by sender and receiver
  std::map<std::string, uint64_t> faults;
};

Counters& counters() {
  static auto& all = *new Counters;
  return all;
}

std::string place(int device) { return device == HOST ? "host" : std::to_string(device); }

std::string quoted(const std::string& text) { return "\"" + text + "\""; }

template <class Map, class Key, class Value>
std::string json(const Map& map, Key key, Value value) {
  std::string text = "{";
  for (const auto& entry : map) {
    if (text.size() > 1) text += ", ";
    text += quoted(key(entry.first)) + ": " + value(entry.second);
  }
  return text + "}";
}

std::string counters_as_json() {
  auto as_it_is = [](const std::string& name) { return name; };
  auto number = [](uint64_t count) { return std::to_string(count); };
  auto by_op = [&](const auto& ops) { return json(ops, as_it_is, number); };
  auto pair = [](const auto& ends) { return place(ends.first) + "-" + place(ends.second); };
  auto copied = [](const Copies& made) {
    std::string count = std::to_string(made.count);
    return "{\"count\": " + count + ", \"bytes\": " + std::to_string(made.bytes) + "}";
  };
  Counters& all = counters();
  std::lock_guard<std::mutex> lock(all.mutex);
  return "{\"kernels\": " + json(all.kernels, place, by_op) + ",\n \"copies\": " +
         json(all.copies, pair, copied) + ",\n \"faults\": " +
         json(all.faults, as_it_is, number) + "}\n";
}

void write_counters() {
  const char* path = text_option("STATS");
  if (!path) return;
  std::string name = path;
  size_t at = name.find("%p");
  if (at != std::string::npos) name.replace(at, 2, std::to_string(getpid()));
  std::ofstream(name) << counters_as_json();
}

// ---- Trace ----

struct Span {
  int device;
  std::string what;
  const void* source;  // of a copy; of a kernel null
  Time queued;
  Time begin;
  Time end;
};

struct Trace {
  std::mutex mutex;
  std::vector<Span> spans;
};

Trace& trace() {
  static auto& all = *new Trace;
  return all;
}

void note_span(int device, const std::string& what, const void* source, Time begin, Time end) {
  static const bool is_on = text_option("TRACE") != nullptr;
  if (!is_on) return;
  std::lock_guard<std::mutex> lock(trace().mutex);
  trace().spans.push_back({device, what, source, queued_time, begin, end});
}

double seconds_since_boot(Time time) {
  return std::chrono::duration<double>(time.time_since_epoch()).count();
}

void write_trace() {
  const char* path = text_option("TRACE");
  if (!path) return;
  std::ofstream file(path);
  file.precision(7);
  file << std::fixed << "device\twhat\tsource\tqueued\tbegin\tend\n";
  std::lock_guard<std::mutex> lock(trace().mutex);
  for (const Span& span : trace().spans) {
    file << span.device << "\t" << span.what;
    file << "\t" << reinterpret_cast<uintptr_t>(span.source);
    for (Time time : {span.queued, span.begin, span.end}) file << "\t" << seconds_since_boot(time);
    file << "\n";
  }
}

// ---- Memory ----

struct Block {
  size_t size;
  int device;
};

struct Memory {
  std::shared_mutex mutex;
  std::map<const char*, Block> blocks;  // by address
  int64_t used[MOST_DEVICES] = {};
};

Memory& memory() {
  static auto& all = *new Memory;
  return all;
}

int64_t device_bytes() {
  static const int64_t bytes = int64_t(emulated_gpu::number_option("MEMORY_MB", 512)) << 20;
  return bytes;
}

void* aligned_memory(uint64_t size, uint64_t alignment) {
  uint64_t rounded = (size + alignment - 1) / alignment * alignment;
  return std::aligned_alloc(alignment, rounded);
}

void allocate(const SP_Device* device, uint64_t size, int64_t, SP_DeviceMemoryBase* result) {
  result->opaque = nullptr;
  result->size = 0;
  std::unique_lock<std::shared_mutex> lock(memory().mutex);
  int64_t& used = memory().used[device->ordinal];
  if (used + int64_t(size) > device_bytes()) return;
  void* block = aligned_memory(size, 4096);
  if (!block) return;
  // Memory that was never written shows, as NaN. Timed mode leaves it alone: nobody reads it, and
  // models larger than this machine's memory fit, since untouched pages take none.
  if (!emulated_gpu::is_timed()) std::memset(block, POISON, size);
  memory().blocks[static_cast<char*>(block)] = {size, device->ordinal};
  used += size;
  result->opaque = block;
  result->size = size;
}

void deallocate(const SP_Device*, SP_DeviceMemoryBase* freed) {
  std::unique_lock<std::shared_mutex> lock(memory().mutex);
  auto found = memory().blocks.find(static_cast<char*>(freed->opaque));
  if (found == memory().blocks.end()) return;
  memory().used[found->second.device] -= found->second.size;
  memory().blocks.erase(found);
  std::free(freed->opaque);
}

void* allocate_on_host(const SP_Device*, uint64_t size) { return aligned_memory(size, 64); }

void deallocate_on_host(const SP_Device*, void* block) { std::free(block); }

TF_Bool memory_usage(const SP_Device* device, int64_t* free, int64_t* total) {
  std::shared_lock<std::shared_mutex> lock(memory().mutex);
  *total = device_bytes();
  *free = *total - memory().used[device->ordinal];
  return true;
}

TF_Bool allocator_stats(const SP_Device*, SP_AllocatorStats*) { return false; }

// ---- Links ----

// A copy takes `latency` and its bytes at `rate`. Meanwhile it books shares of what it passes, such
// as a bridge or a socket's link: the next copy through there begins when the share is free.
struct Link {
  double rate = 0;     // bytes per second
  double latency = 0;  // seconds
  struct Share {
    int resource;
    double rate;
  };
  std::vector<Share> shares;
};

using Links = std::map<std::pair<int, int>, Link>;

// Lines of the file: sender receiver rate latency n, and n times: resource rate. `#` is a comment.
Links read_links() {
  Links links;
  const char* path = text_option("MACHINE");
  if (!path) return links;
  std::ifstream file(path);
  if (!file) stop(std::string("cannot read the links of EMULATED_GPU_MACHINE=") + path);
  std::string line;
  while (std::getline(file, line)) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream words(line);
    std::pair<int, int> ends;
    Link link;
    size_t count = 0;
    words >> ends.first >> ends.second >> link.rate >> link.latency >> count;
    link.shares.resize(count);
    for (Link::Share& share : link.shares) words >> share.resource >> share.rate;
    if (!words) stop(std::string(path) + ": not a link: " + line);
    links[ends] = link;
  }
  return links;
}

// Logical GPUs are parts of one chip: its kernels stand still while a copy occupies the memory, and
// one thread of TensorFlow is busy with what follows each copy, for CHIP_US.
double chip_seconds() {
  static const double seconds = emulated_gpu::number_option("CHIP_US", 0) * 1e-6;
  return seconds;
}

// For how long the chip's memory has been busy so far, in ticks.
std::atomic<int64_t>& memory_time() {
  static std::atomic<int64_t> ticks{0};
  return ticks;
}

// Kernels of all GPUs that read and write use the chip's memory one after another.
void use_chip_memory(Time begin, double seconds) {
  static auto& memory = *new Turn;
  stream_time = std::max(stream_time, memory.take(begin, seconds));
  sleep_until(stream_time);
  memory_time() += scaled(seconds).count();
}

void end_copy_on_chip(Clock::duration copying) {
  static auto& follower = *new Turn;
  memory_time() += copying.count();
  stream_time = follower.take(stream_time, chip_seconds());
  sleep_until(stream_time);
}

// Blocks the stream's thread for the time of the copy, if the machine's file has this link.
void pass_link(int from, int to, uint64_t size, const void* source) {
  static const Links& links = *new Links(read_links());
  static std::mutex mutex;
  static auto& free_at = *new std::map<int, Time>;  // by resource
  auto found = links.find({from, to});
  if (found == links.end()) return;
  const Link& link = found->second;
  Time begin = stream_time + scaled(link.latency);
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (const Link::Share& share : link.shares) begin = std::max(begin, free_at[share.resource]);
    for (const Link::Share& share : link.shares) {
      free_at[share.resource] = begin + scaled(size / share.rate);
    }
  }
  stream_time = begin + scaled(size / link.rate);
  sleep_until(stream_time);
  bool is_between_gpus = from != HOST && to != HOST;
  if (chip_seconds() > 0 && is_between_gpus) end_copy_on_chip(scaled(size / link.rate));
  std::string what = "copy " + place(from) + ">" + place(to) + " " + std::to_string(size);
  note_span(from, what, source, begin, stream_time);
}

// ---- Copies ----

// In timed mode only values that decide what runs next are copied: shapes, sizes, conditions.
bool is_copied(int from, int to, uint64_t size) {
  if (!emulated_gpu::is_timed()) return true;
  bool is_between_gpus = from != HOST && to != HOST;
  return size <= (is_between_gpus ? 4096 : 65536);
}

// Changes a bit of the n-th copy from a sender to a receiver, counted from when it was set.
struct Flip {
  std::atomic<int> sender{HOST}, receiver{HOST};
  std::atomic<int64_t> countdown{0};
} flip;

void copy(void* to, int receiver, const void* from, int sender, uint64_t size) {
  if (sender != receiver) pass_link(sender, receiver, size, from);
  if (is_copied(sender, receiver, size)) std::memcpy(to, from, size);
  bool is_there = sender == flip.sender && receiver == flip.receiver && size;
  if (is_there && --flip.countdown == 0) static_cast<char*>(to)[size / 2] ^= 1;
  std::lock_guard<std::mutex> lock(counters().mutex);
  Copies& copies = counters().copies[{sender, receiver}];
  copies.count += 1;
  copies.bytes += size;
}

// TensorFlow makes six calls of CUDA for a copy between GPUs, and about three for a kernel.
constexpr int LAUNCHES_OF_A_COPY = 2;

// Until the copy is made, its destination has no value: a reader that does not wait gets NaN.
void queue_copy(SP_Stream stream, void* to, int receiver, const void* from, int sender,
                uint64_t size) {
  Work poison;
  if (!emulated_gpu::is_timed() && to != from) {
    poison = [=] { std::memset(to, POISON, size); };
  }
  stream->queue->push(poison, [=] { copy(to, receiver, from, sender, size); });
}

int checked_device(const void* address, uint64_t size) {
  int device = emulated_gpu::device_of_memory(address);
  if (device == HOST && size) emulated_gpu::count_fault("a copy from or to a GPU: host memory");
  return device;
}

void copy_to_host(const SP_Device*, SP_Stream stream, void* to, const SP_DeviceMemoryBase* from,
                  uint64_t size, TF_Status*) {
  queue_copy(stream, to, HOST, from->opaque, checked_device(from->opaque, size), size);
}

void copy_from_host(const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* to, const void* from,
                    uint64_t size, TF_Status*) {
  queue_copy(stream, to->opaque, checked_device(to->opaque, size), from, HOST, size);
}

void copy_between(const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* to,
                  const SP_DeviceMemoryBase* from, uint64_t size, TF_Status*) {
  int receiver = checked_device(to->opaque, size);
  int sender = checked_device(from->opaque, size);
  if (emulated_gpu::is_timed()) emulated_gpu::launch(stream, LAUNCHES_OF_A_COPY, 0);
  queue_copy(stream, to->opaque, receiver, from->opaque, sender, size);
}

void copy_to_host_now(const SP_Device*, void* to, const SP_DeviceMemoryBase* from, uint64_t size,
                      TF_Status*) {
  copy(to, HOST, from->opaque, checked_device(from->opaque, size), size);
}

void copy_from_host_now(const SP_Device*, SP_DeviceMemoryBase* to, const void* from, uint64_t size,
                        TF_Status*) {
  copy(to->opaque, checked_device(to->opaque, size), from, HOST, size);
}

void copy_between_now(const SP_Device*, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from,
                      uint64_t size, TF_Status*) {
  int receiver = checked_device(to->opaque, size);
  int sender = checked_device(from->opaque, size);
  copy(to->opaque, receiver, from->opaque, sender, size);
}

void fill_bytes(const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* at, uint8_t value,
                uint64_t size, TF_Status*) {
  void* to = at->opaque;
  stream->queue->push(nullptr, [=] { std::memset(to, value, size); });
}

void fill_zeros(const SP_Device* device, SP_Stream stream, SP_DeviceMemoryBase* at, uint64_t size,
                TF_Status* status) {
  fill_bytes(device, stream, at, 0, size, status);
}

void fill_words(const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* at, uint32_t value,
                uint64_t size, TF_Status*) {
  auto* to = static_cast<uint32_t*>(at->opaque);
  stream->queue->push(nullptr, [=] { std::fill_n(to, size / sizeof value, value); });
}

// ---- Streams and events in the C API ----

struct AllStreams {
  std::mutex mutex;
  std::map<int, std::vector<std::weak_ptr<Queue>>> queues;  // by device
  uint64_t count = 0;
};

AllStreams& all_streams() {
  static auto& all = *new AllStreams;
  return all;
}

void create_stream(const SP_Device* device, SP_Stream* stream, TF_Status*) {
  auto queue = std::make_shared<Queue>();
  std::lock_guard<std::mutex> lock(all_streams().mutex);
  all_streams().queues[device->ordinal].push_back(queue);
  uint64_t seed = emulated_gpu::number_option("SEED", 0) * 1000003 + all_streams().count++;
  std::thread thread([queue, seed] { queue->serve(seed); });
  *stream = new SP_Stream_st{device->ordinal, queue, std::move(thread)};
}

void destroy_stream(const SP_Device*, SP_Stream stream) {
  stream->queue->close();
  bool is_this_thread = stream->thread.get_id() == std::this_thread::get_id();
  is_this_thread ? stream->thread.detach() : stream->thread.join();
  delete stream;
}

// EMULATED_GPU_WAITS=0: no stream waits for another. Tests of results have to fail then.
void wait_for_item(SP_Stream stream, const std::shared_ptr<Queue>& other, Queue::Ticket ticket) {
  static const bool waits = emulated_gpu::number_option("WAITS", 1) != 0;
  if (!waits || !other || other == stream->queue) return;
  stream->queue->push(nullptr, [=] { stream_time = std::max(stream_time, other->wait(ticket)); });
}

// Returns the last item of a stream. In timed mode it is the event itself, which takes EVENT_US.
Queue::Ticket mark_of(SP_Stream stream) {
  static const double seconds = emulated_gpu::number_option("EVENT_US", 0) * 1e-6;
  if (!emulated_gpu::is_timed() || seconds <= 0) return stream->queue->last();
  return stream->queue->push(nullptr, [=] { sleep_until(stream_time += scaled(seconds)); });
}

void create_dependency(const SP_Device*, SP_Stream dependent, SP_Stream other, TF_Status*) {
  wait_for_item(dependent, other->queue, mark_of(other));
}

void stream_status(const SP_Device*, SP_Stream, TF_Status* status) {
  TF_SetStatus(status, TF_OK, "");
}

void wait_for_stream(const SP_Device*, SP_Stream stream, TF_Status*) {
  emulated_gpu::wait_for(stream);
}

void wait_for_number(int device) {
  std::vector<std::weak_ptr<Queue>> queues;
  {
    std::lock_guard<std::mutex> lock(all_streams().mutex);
    queues = all_streams().queues[device];
  }
  for (const auto& weak : queues) {
    auto queue = weak.lock();
    if (queue) queue->wait(queue->last());
  }
}

void wait_for_device(const SP_Device* device, TF_Status*) { wait_for_number(device->ordinal); }

TF_Bool call_host(const SP_Device*, SP_Stream stream, SE_StatusCallbackFn function,
                  void* argument) {
  stream->queue->push(nullptr, [=] {
    TF_Status* status = TF_NewStatus();
    function(argument, status);
    TF_DeleteStatus(status);
  });
  return true;
}

void create_event(const SP_Device*, SP_Event* event, TF_Status*) { *event = new SP_Event_st; }

void destroy_event(const SP_Device*, SP_Event event) { delete event; }

void record_event(const SP_Device*, SP_Stream stream, SP_Event event, TF_Status*) {
  std::lock_guard<std::mutex> lock(event->mutex);
  event->mark = {stream->queue, mark_of(stream)};
}

SE_EventStatus event_status(const SP_Device*, SP_Event event) {
  auto mark = event->get();
  bool is_done = !mark.queue || mark.queue->is_done(mark.ticket);
  return is_done ? SE_EVENT_COMPLETE : SE_EVENT_PENDING;
}

void stream_waits_for_event(const SP_Device*, SP_Stream stream, SP_Event event, TF_Status*) {
  auto mark = event->get();
  wait_for_item(stream, mark.queue, mark.ticket);
}

void host_waits_for_event(const SP_Device*, SP_Event event, TF_Status*) {
  auto mark = event->get();
  if (mark.queue) mark.queue->wait(mark.ticket);
}

void create_timer(const SP_Device*, SP_Timer* timer, TF_Status*) { *timer = new SP_Timer_st; }

void destroy_timer(const SP_Device*, SP_Timer timer) { delete timer; }

void start_timer(const SP_Device*, SP_Stream stream, SP_Timer timer, TF_Status*) {
  stream->queue->push(nullptr, [=] { timer->begin = Clock::now(); });
}

void stop_timer(const SP_Device*, SP_Stream stream, SP_Timer timer, TF_Status*) {
  stream->queue->push(nullptr, [=] { timer->end = Clock::now(); });
}

uint64_t timer_nanoseconds(SP_Timer timer) {
  return std::chrono::nanoseconds(timer->end - timer->begin).count();
}

// ---- The platform ----

void device_count(const SP_Platform*, int* count, TF_Status*) {
  *count = emulated_gpu::number_option("COUNT", 8);
  if (*count > MOST_DEVICES) stop("at most 64 devices");
}

void create_device(const SP_Platform*, SE_CreateDeviceParams* params, TF_Status*) {
  static char bus_ids[MOST_DEVICES][20];
  char* bus_id = bus_ids[params->ordinal];
  std::snprintf(bus_id, sizeof bus_ids[0], "0000:%02x:00.0", params->ordinal + 1);
  SP_Device& device = *params->device;
  device = {SP_DEVICE_STRUCT_SIZE};
  device.ordinal = params->ordinal;
  device.hardware_name = "emulated GPU";
  device.device_vendor = "none";
  device.pci_bus_id = bus_id;
}

void create_device_functions(const SP_Platform*, SE_CreateDeviceFnsParams* params, TF_Status*) {
  *params->device_fns = {SP_DEVICE_FNS_STRUCT_SIZE};
}

void create_executor(const SP_Platform*, SE_CreateStreamExecutorParams* params, TF_Status*) {
  SP_StreamExecutor& executor = *params->stream_executor;
  executor = {SP_STREAMEXECUTOR_STRUCT_SIZE};

  executor.allocate = allocate;
  executor.deallocate = deallocate;
  executor.host_memory_allocate = allocate_on_host;
  executor.host_memory_deallocate = deallocate_on_host;
  executor.unified_memory_allocate = allocate_on_host;
  executor.unified_memory_deallocate = deallocate_on_host;
  executor.get_allocator_stats = allocator_stats;
  executor.device_memory_usage = memory_usage;

  executor.create_stream = create_stream;
  executor.destroy_stream = destroy_stream;
  executor.create_stream_dependency = create_dependency;
  executor.get_stream_status = stream_status;
  executor.block_host_until_done = wait_for_stream;
  executor.synchronize_all_activity = wait_for_device;
  executor.host_callback = call_host;

  executor.create_event = create_event;
  executor.destroy_event = destroy_event;
  executor.get_event_status = event_status;
  executor.record_event = record_event;
  executor.wait_for_event = stream_waits_for_event;
  executor.block_host_for_event = host_waits_for_event;

  executor.create_timer = create_timer;
  executor.destroy_timer = destroy_timer;
  executor.start_timer = start_timer;
  executor.stop_timer = stop_timer;

  executor.memcpy_dtoh = copy_to_host;
  executor.memcpy_htod = copy_from_host;
  executor.memcpy_dtod = copy_between;
  executor.sync_memcpy_dtoh = copy_to_host_now;
  executor.sync_memcpy_htod = copy_from_host_now;
  executor.sync_memcpy_dtod = copy_between_now;
  executor.mem_zero = fill_zeros;
  executor.memset = fill_bytes;
  executor.memset32 = fill_words;
}

void create_timer_functions(const SP_Platform*, SP_TimerFns* functions, TF_Status*) {
  *functions = {SP_TIMER_FNS_STRUCT_SIZE};
  functions->nanoseconds = timer_nanoseconds;
}

}  // namespace

// ---- What the kernels use ----

namespace emulated_gpu {

double number_option(const char* name, double otherwise) {
  const char* text = text_option(name);
  return text ? std::atof(text) : otherwise;
}

void enqueue(SP_Stream stream, Work prepare, Work work) {
  stream->queue->push(std::move(prepare), std::move(work));
}

void wait_for(SP_Stream stream) { stream->queue->wait(stream->queue->last()); }

int device_of_stream(SP_Stream stream) { return stream->device; }

int device_of_memory(const void* address) {
  auto at = static_cast<const char*>(address);
  std::shared_lock<std::shared_mutex> lock(memory().mutex);
  auto next = memory().blocks.upper_bound(at);
  if (next == memory().blocks.begin()) return HOST;
  auto& [begin, block] = *std::prev(next);
  return at < begin + block.size ? block.device : HOST;
}

void count_kernel(int device, const std::string& op) {
  std::lock_guard<std::mutex> lock(counters().mutex);
  ++counters().kernels[device][op];
}

void count_fault(const std::string& what) {
  std::lock_guard<std::mutex> lock(counters().mutex);
  if (!counters().faults[what]++) std::fprintf(stderr, "emulated GPU: %s\n", what.c_str());
}

bool is_timed() {
  static const bool is_on = text_option("TIMING") != nullptr;
  return is_on;
}

void queue_kernel_time(SP_Stream stream, double seconds, double memory_seconds,
                       const std::string& what) {
  enqueue(stream, nullptr, [=, device = stream->device] {
    Time begin = stream_time;
    int64_t busy_before = memory_time();
    stream_time = begin + scaled(seconds);
    sleep_until(stream_time);
    if (chip_seconds() > 0 && memory_seconds > 0) {
      use_chip_memory(begin, memory_seconds);
    } else {
      stream_time += Clock::duration(memory_time() - busy_before);
      sleep_until(stream_time);
    }
    note_span(device, what, nullptr, begin, stream_time);
  });
}

std::atomic<double>& host_us() {
  static std::atomic<double> microseconds(number_option("HOST_US", 0));
  return microseconds;
}
std::atomic<double>& launch_us() {
  static std::atomic<double> microseconds(number_option("LAUNCH_US", 0));
  return microseconds;
}
double host_seconds() { return host_us() * 1e-6; }

void launch(SP_Stream stream, double launches, double more_seconds) {
  static auto& turns = *new std::array<Turn, MOST_DEVICES>;
  double seconds = launches * launch_us() * 1e-6;
  sleep_until(turns[stream->device].take(Clock::now(), seconds) + scaled(more_seconds));
}

}  // namespace emulated_gpu

// ---- What TensorFlow and tests/emulated_gpu/plugin.py look up ----

#define EXPORTED extern "C" __attribute__((visibility("default")))

// The counters as JSON. The caller reads the text before it calls this again.
EXPORTED const char* emulated_gpu_counters() {
  static std::string text;
  text = counters_as_json();
  return text.c_str();
}

// These change EMULATED_GPU_HOST_US and EMULATED_GPU_LAUNCH_US for the steps that follow.
EXPORTED void emulated_gpu_set_host_us(double microseconds) {
  emulated_gpu::host_us() = microseconds;
}
EXPORTED void emulated_gpu_set_launch_us(double microseconds) {
  emulated_gpu::launch_us() = microseconds;
}

// Lets the n-th copy from now on from a sender to a receiver change a bit; 0: none.
EXPORTED void emulated_gpu_set_flip(int sender, int receiver, int64_t n) {
  flip.countdown = 0;
  flip.sender = sender;
  flip.receiver = receiver;
  flip.countdown = n;
}

// Waits until all devices have done what is queued.
EXPORTED void emulated_gpu_wait() {
  for (int device = 0; device < MOST_DEVICES; ++device) wait_for_number(device);
}

// Returns the longest gap since the last call, in seconds of this machine.
EXPORTED double emulated_gpu_longest_gap() {
  return std::chrono::duration<double>(Clock::duration(longest_gap().exchange(0))).count();
}

EXPORTED void SE_InitPlugin(SE_PlatformRegistrationParams* params, TF_Status*) {
  std::atexit(write_counters);
  std::atexit(write_trace);

  SP_Platform& platform = *params->platform;
  platform.struct_size = SP_PLATFORM_STRUCT_SIZE;
  platform.name = "EMULATED";
  platform.type = "GPU";
  platform.use_bfc_allocator = true;
  platform.force_memory_growth = true;
  params->destroy_platform = [](auto...) {};

  SP_PlatformFns& functions = *params->platform_fns;
  functions.struct_size = SP_PLATFORM_FNS_STRUCT_SIZE;
  functions.get_device_count = device_count;
  functions.create_device = create_device;
  functions.destroy_device = [](auto...) {};
  functions.create_device_fns = create_device_functions;
  functions.destroy_device_fns = [](auto...) {};
  functions.create_stream_executor = create_executor;
  functions.destroy_stream_executor = [](auto...) {};
  functions.create_timer_fns = create_timer_functions;
  functions.destroy_timer_fns = [](auto...) {};
  params->destroy_platform_fns = [](auto...) {};
}
