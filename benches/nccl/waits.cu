// The effect of one thread's call on another thread's copies while a kernel waits, as NCCL's kernels do for a peer.
//
//     nvcc -O2 -arch=native -o waits benches/nccl/waits.cu -lcuda && for n in $(seq 0 19); do ./waits $n; done
//
// A kernel waits for a flag in host memory. Thread A makes call `n`; 0.1 s later thread B submits a copy and a kernel to a stream of
// its own. The flag is raised when B's work is done, or after 3 s. One process for each call, since a stuck one spoils what follows.
#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <unistd.h>
#include <vector>

using Clock = std::chrono::steady_clock;
static double ms_since(Clock::time_point t) { return std::chrono::duration<double, std::milli>(Clock::now() - t).count(); }

__global__ void wait_for(volatile int *flag) { while (!*flag) __nanosleep(1000); }
__global__ void touch(char *at) { at[threadIdx.x] = 1; }
__global__ void never_launched_before(char *at) { at[threadIdx.x] = 2; }
__global__ void raise(volatile int *flag, int value) { *flag = value; __threadfence_system(); }

constexpr size_t M = 1 << 20;
constexpr int WAITS = 0, DONE = 16; // flags, cache lines apart

struct Call { const char *name; std::function<int()> make; };

int main(int argc, char **argv) {
  const int which = argc > 1 ? atoi(argv[1]) : 0;
  cudaSetDevice(0);
  int *flags, *flags_gpu;
  cudaHostAlloc(&flags, 4096, cudaHostAllocMapped);
  cudaHostGetDevicePointer(&flags_gpu, flags, 0);
  memset(flags, 0, 4096);
  volatile int *seen = flags;
  char *a, *b, *pinned, *to_free, *to_free_host, *pageable = static_cast<char *>(malloc(64 * M));
  memset(pageable, 1, 64 * M);
  cudaMalloc(&a, 64 * M); cudaMalloc(&b, 64 * M); cudaMalloc(&to_free, 300 * M);
  cudaHostAlloc(&pinned, 64 * M, 0); cudaHostAlloc(&to_free_host, M, 0);
  cudaStream_t waiting, ours, other;
  int least, greatest;
  cudaDeviceGetStreamPriorityRange(&least, &greatest);
  cudaStreamCreateWithFlags(&waiting, cudaStreamNonBlocking);
  cudaStreamCreateWithPriority(&ours, cudaStreamNonBlocking, greatest);
  cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
  cudaEvent_t event;
  cudaEventCreate(&event);
  // Loaded before, all but one.
  raise<<<1, 1, 0, ours>>>(flags_gpu + DONE, 0);
  touch<<<1, 32, 0, ours>>>(a);
  if (int failed = cudaDeviceSynchronize()) { printf("no GPU: error %d\n", failed); return 1; }

  void *made = nullptr;
  const std::vector<Call> calls = {
    {"none", [] { return 0; }},
    {"cudaFree", [&] { return cudaFree(to_free); }},
    {"cudaMalloc", [&] { return cudaMalloc(&made, 500 * M); }},
    {"cudaHostAlloc", [&] { return cudaHostAlloc(&made, 32 * M, 0); }},
    {"cudaFreeHost", [&] { return cudaFreeHost(to_free_host); }},
    {"cudaDeviceSynchronize", [] { return cudaDeviceSynchronize(); }},
    {"cudaStreamSynchronize of the waiting stream", [&] { return cudaStreamSynchronize(waiting); }},
    {"cudaStreamCreate", [] { cudaStream_t s; return cudaStreamCreate(&s); }},
    {"cudaMemcpy from pageable memory", [&] { return cudaMemcpy(a, pageable, 32 * M, cudaMemcpyHostToDevice); }},
    {"cudaMemcpy to pinned memory", [&] { return cudaMemcpy(pinned, a, 32 * M, cudaMemcpyDeviceToHost); }},
    {"first launch of a kernel", [&] { never_launched_before<<<1, 32, 0, other>>>(a); return cudaGetLastError(); }},
    {"cuModuleLoadData", [] {
       CUmodule module;
       return static_cast<int>(cuModuleLoadData(&module, ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry k(){ret;}\n"));
     }},
    {"cudaEventSynchronize behind the kernel", [&] { cudaEventRecord(event, waiting); return cudaEventSynchronize(event); }},
    {"cudaMallocAsync, cudaFreeAsync", [&] { cudaMallocAsync(&made, 100 * M, other); return cudaFreeAsync(made, other); }},
    {"cudaHostRegister", [&] { return cudaHostRegister(pageable, 64 * M, 0); }},
    {"cudaMemset", [&] { return cudaMemset(a, 0, M); }},
    {"1,200 launches behind the kernel", [&] {
       for (int n = 0; n < 1200; n++) touch<<<1, 32, 0, waiting>>>(a);
       return cudaGetLastError();
     }},
    {"pageable cudaMemcpyAsync behind the kernel", [&] { return cudaMemcpyAsync(a, pageable, 32 * M, cudaMemcpyHostToDevice, waiting); }},
    {"cudaMemPoolTrimTo", [&] {
       cudaMemPool_t pool;
       cudaDeviceGetDefaultMemPool(&pool, 0);
       return cudaMemPoolTrimTo(pool, 0);
     }},
    {"cudaStreamDestroy", [&] { return cudaStreamDestroy(other); }},
  };
  if (which < 0 || which >= static_cast<int>(calls.size())) { printf("calls are 0 to %zu\n", calls.size() - 1); return 2; }

  wait_for<<<1, 1, 0, waiting>>>(flags_gpu + WAITS);
  usleep(20000);
  std::atomic<bool> returned{false};
  double took = 0;
  int failed = 0;
  std::thread caller([&] {
    cudaSetDevice(0);
    const auto since = Clock::now();
    failed = calls[which].make();
    took = ms_since(since);
    returned = true;
  });
  usleep(100000);
  const bool at_once = returned;
  std::atomic<const char *> where{"stuck in cudaMemcpyAsync"};
  std::atomic<bool> over{false};
  const auto since = Clock::now();
  std::thread copier([&] {
    cudaSetDevice(0);
    cudaMemcpyAsync(pinned + 32 * M, b, M, cudaMemcpyDeviceToHost, ours);
    where = "stuck in the launch";
    raise<<<1, 1, 0, ours>>>(flags_gpu + DONE, 1);
    where = "submitted, does not run";
    while (!seen[DONE] && ms_since(since) < 3000) usleep(50);
    if (seen[DONE]) where = "done";
    over = true;
  });
  while (!over && ms_since(since) < 3000) usleep(50);
  const char *told = where;
  const double after = ms_since(since);
  flags[WAITS] = 1;
  copier.join();
  caller.join();
  printf("%-44s %s (%.1f ms)%s; the copy: %s (%.2f ms)\n", calls[which].name, at_once ? "returns" : "waits", took,
         failed ? " and fails" : "", told, after);
  fflush(stdout);
  _exit(0);
}
