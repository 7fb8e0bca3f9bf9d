#include "core/virtual_threads.h"

#include <algorithm>
#include <ctime>
#include <functional>
#include <map>
#include <mutex>
#include <queue>
#include <tuple>

#include "stoker.h"

namespace stoker {

namespace {

using Place = std::tuple<const char*, const char*, int, int>;  // kernel, function, line, threads

std::mutex mutex;
std::map<Place, stoker_region> regions;
double reading = 0.0;  // seconds that a look at the clock takes
thread_local const char* current = "";

}  // namespace

int VirtualRegion::count_ = 0;

void VirtualRegion::set_count(int count) {
  const std::lock_guard<std::mutex> lock(mutex);
  count_ = count;
  regions.clear();
  constexpr int kTrials = 2000;
  const double begin = now();
  for (int i = 0; i < kTrials; ++i) now();
  reading = (now() - begin) / kTrials;
}

const char* VirtualRegion::enter(const char* kernel) { return std::exchange(current, kernel); }

VirtualRegion::VirtualRegion(Schedule schedule, int threads, int64_t units, const char* where, int line)
    : schedule_(schedule), threads_(std::max(1, threads)), line_(line), units_(units), where_(where), begin_(now()) {}

VirtualRegion::~VirtualRegion() {
  double work = 0.0, longest = 0.0;
  for (const double piece : pieces_) {
    work += piece;
    longest = std::max(longest, piece);
  }
  const double last = makespan(), measured = now() - begin_;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [found, is_new] = regions.try_emplace(Place{current, where_, line_, threads_});
  stoker_region& region = found->second;
  if (is_new) {
    region.kernel = current;
    region.where = where_;
    region.line = line_;
    region.threads = threads_;
    region.fewest = units_;
  }
  region.calls += 1;
  region.units += units_;
  region.fewest = std::min(region.fewest, units_);
  region.work += work;
  region.makespan += last;
  region.longest = std::max(region.longest, longest);
  region.measured += measured;
}

void VirtualRegion::add(double seconds) { pieces_.push_back(std::max(0.0, seconds - reading)); }

double VirtualRegion::makespan() const {
  double work = 0.0;
  if (schedule_ == Schedule::kEven) {
    for (const double piece : pieces_) work += piece;
    return work / threads_;
  }
  std::priority_queue<double, std::vector<double>, std::greater<double>> free;  // when each thread has finished what it has
  for (int thread = 0; thread < threads_; ++thread) free.push(0.0);
  double last = 0.0;
  for (const double piece : pieces_) {
    const double end = free.top() + piece;
    free.pop();
    free.push(end);
    last = std::max(last, end);
  }
  return last;
}

// The thread's own time: other programs and waiting do not count.
double VirtualRegion::now() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace stoker

STOKER_API void stoker_virtual_threads(int32_t threads) { stoker::VirtualRegion::set_count(std::max(0, threads)); }

STOKER_API int64_t stoker_regions(stoker_region* found, int64_t room) {
  const std::lock_guard<std::mutex> lock(stoker::mutex);
  int64_t count = 0;
  for (const auto& [place, region] : stoker::regions) {
    if (count < room) found[count] = region;
    ++count;
  }
  return count;
}
