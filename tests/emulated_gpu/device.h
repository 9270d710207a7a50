// What the kernels need of the emulated device. device.cc implements it.
#pragma once

#include <functional>
#include <string>

#include "tensorflow/c/experimental/stream_executor/stream_executor.h"

namespace emulated_gpu {

using Work = std::function<void()>;

constexpr int HOST = -1;  // the number of the host, beside the GPUs' 0 … K - 1

// Queues work on a stream and returns at once. The stream's thread calls `prepare` when the turn of
// the work comes, waits for the random delay, and calls `work`.
void enqueue(SP_Stream stream, Work prepare, Work work);

void wait_for(SP_Stream stream);  // blocks until all that is queued has run

int device_of_stream(SP_Stream stream);
int device_of_memory(const void* address);  // HOST: no GPU has this address

void count_kernel(int device, const std::string& op);
void count_fault(const std::string& what);  // a pointer that a real GPU could not read

// ---- Timed mode: nothing is computed, and all work takes its time ----
bool is_timed();
void queue_kernel_time(SP_Stream stream, double seconds, double memory_seconds,
                       const std::string& what);
double host_seconds();  // for which the host is busy with one of the model's kernels
// Keeps the calling thread for so many launches on a GPU, which begin when those of other threads
// there have ended, and then for `more_seconds`.
void launch(SP_Stream stream, double launches, double more_seconds);

double number_option(const char* name, double otherwise);  // of EMULATED_GPU_NAME

}  // namespace emulated_gpu
