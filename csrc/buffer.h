// Memory for large results on the CPU, reused after it is freed.
//
// A new allocation of 256 MB costs more than the scan that fills it: 65 000 page faults, each of which clears a page.
// The C library returns such blocks to the system immediately, so every training iteration would repeat this. Here a
// freed block is kept for the next request of about its size. The memory in use and kept never exceeds the largest
// amount that was in use at one time.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#include <mutex>
#include <new>
#include <vector>

namespace orthokern {

class BufferPool {
 public:
  struct Block {
    void* memory;
    size_t bytes;
  };

  // Results are held by tensors; scratch is freed when a call ends. They have separate pools because the two reach
  // their largest amounts at different times, and each amount is the bound of its own pool.
  static BufferPool& results() {
    static BufferPool* pool = new BufferPool;  // never destroyed: tensors may outlive static destruction
    return *pool;
  }
  static BufferPool& scratch() {
    static BufferPool* pool = new BufferPool;
    return *pool;
  }

  Block take(size_t bytes) {
    bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    std::lock_guard<std::mutex> lock(mutex_);
    size_t best = waiting_.size();
    for (size_t i = 0; i < waiting_.size(); i++)
      if (waiting_[i].bytes >= bytes && waiting_[i].bytes <= bytes + bytes / 4 &&
          (best == waiting_.size() || waiting_[i].bytes < waiting_[best].bytes))
        best = i;
    Block block;
    if (best < waiting_.size()) {
      block = waiting_[best];
      waiting_.erase(waiting_.begin() + best);
      waiting_bytes_ -= block.bytes;
    } else {
      block = map(bytes);
      if (!block.memory) {
        release_locked();
        block = map(bytes);
      }
      if (!block.memory) throw std::bad_alloc();
    }
    live_bytes_ += block.bytes;
    if (live_bytes_ > peak_bytes_) peak_bytes_ = live_bytes_;
    trim();
    return block;
  }

  void give(Block block) {
    std::lock_guard<std::mutex> lock(mutex_);
    live_bytes_ -= block.bytes;
    waiting_bytes_ += block.bytes;
    waiting_.push_back(block);
    trim();
  }

  void release() {
    std::lock_guard<std::mutex> lock(mutex_);
    release_locked();
    peak_bytes_ = live_bytes_;
  }

 private:
  static constexpr size_t kHugePage = 2 << 20;

  static Block map(size_t bytes) {
    void* memory = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return {nullptr, 0};
    // Align to a huge page and request huge pages: 512 times fewer faults on first use.
    const uintptr_t begin = reinterpret_cast<uintptr_t>(memory),
                    aligned = (begin + kHugePage - 1) / kHugePage * kHugePage;
    if (aligned > begin) munmap(memory, aligned - begin);
    const uintptr_t end = begin + bytes + kHugePage;
    if (end > aligned + bytes) munmap(reinterpret_cast<void*>(aligned + bytes), end - aligned - bytes);
#ifdef MADV_HUGEPAGE
    madvise(reinterpret_cast<void*>(aligned), bytes, MADV_HUGEPAGE);
#endif
    return {reinterpret_cast<void*>(aligned), bytes};
  }
  // Frees blocks, oldest first, until the total is at most the peak.
  void trim() {
    while (!waiting_.empty() && live_bytes_ + waiting_bytes_ > peak_bytes_) drop_oldest();
  }
  void drop_oldest() {
    munmap(waiting_.front().memory, waiting_.front().bytes);
    waiting_bytes_ -= waiting_.front().bytes;
    waiting_.erase(waiting_.begin());
  }
  void release_locked() {
    while (!waiting_.empty()) drop_oldest();
  }

  std::mutex mutex_;
  std::vector<Block> waiting_;
  size_t live_bytes_ = 0, waiting_bytes_ = 0, peak_bytes_ = 0;
};

// One block, as an object with Python's buffer protocol: torch.frombuffer keeps it alive as long as the tensor's
// storage.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : bytes_(bytes), block_(BufferPool::results().take(bytes)) {}
  ~Buffer() { BufferPool::results().give(block_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void* memory() const { return block_.memory; }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_;
  BufferPool::Block block_;
};

}  // namespace orthokern
