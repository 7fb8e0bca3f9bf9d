#include "comm/segment.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>

namespace stoker::comm {
namespace {

std::size_t round_up(std::size_t value, std::size_t to) { return (value + to - 1) / to * to; }

std::size_t blocks_offset() { return round_up(sizeof(Header), 4096); }

std::size_t slots_offset(int ranks) { return round_up(blocks_offset() + sizeof(RankBlock) * ranks, 4096); }

std::size_t pipes_offset(int ranks, std::size_t slot_bytes) { return slots_offset(ranks) + slot_bytes * kSlots * ranks; }

// Up to 256 KB, less where there are many pairs of ranks.
std::size_t pipe_bytes(int ranks) {
  const std::size_t pairs = static_cast<std::size_t>(ranks) * ranks;
  return std::clamp<std::size_t>((std::size_t{64} << 20) / pairs / 4096 * 4096, 4096, 256 << 10);
}

[[noreturn]] void fail(const std::string& what, int error) {
  throw Error(STOKER_COMM_SYSTEM, what + ": " + std::strerror(error));
}

std::uint64_t random_bits() {
  std::uint64_t bits = 0;
  if (getrandom(&bits, sizeof(bits), 0) != sizeof(bits)) fail("getrandom", errno);
  return bits;
}

std::string hex(std::uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(value));
  return text;
}

constexpr const char* kPrefix = "stoker-";

// The process that creates a named segment, as part of the name: pid namespace, pid, and start time, since a pid may be reused.
std::string owner_of(pid_t pid) {
  return std::to_string(pid_namespace()) + "-" + std::to_string(pid) + "-" + std::to_string(process_start(pid));
}

// Removes named segments of this user whose creator was killed before it could. Those of other pid namespaces may be in use.
void remove_leftovers() {
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(opendir("/dev/shm"), closedir);
  if (!directory) return;
  while (const dirent* entry = readdir(directory.get())) {
    unsigned long long space = 0, started = 0;
    long long pid = 0;
    const std::string pattern = std::string(kPrefix) + "%llu-%lld-%llu-";
    if (std::sscanf(entry->d_name, pattern.c_str(), &space, &pid, &started) != 3 || !space || space != pid_namespace()) continue;
    const std::uint64_t now = process_start(pid);
    if (now ? now == started : errno != ESRCH) continue;
    struct stat status {};
    if (fstatat(dirfd(directory.get()), entry->d_name, &status, AT_SYMLINK_NOFOLLOW) == 0 && status.st_uid == geteuid() &&
        S_ISREG(status.st_mode))
      shm_unlink((std::string("/") + entry->d_name).c_str());
  }
}

// Reserved in advance, because a full /dev/shm would be a SIGBUS later. A memfd has no such limit.
void reserve(int descriptor, std::size_t from, std::size_t bytes) {
  if (const int error = posix_fallocate(descriptor, static_cast<off_t>(from), static_cast<off_t>(bytes)))
    fail("cannot reserve " + std::to_string(bytes >> 10) + " KB of shared memory", error);
}

}  // namespace

// If it returns 0, errno is ESRCH for a process that does not exist, and something else if that could not be found out, for
// example because no descriptor was free.
std::uint64_t process_start(std::int64_t pid) {
  const auto gone = [] {
    errno = ESRCH;
    return std::uint64_t{0};
  };
  const auto unknown = [](int error) {
    errno = error == ESRCH ? EIO : error;
    return std::uint64_t{0};
  };
  char path[64], text[1024];
  std::snprintf(path, sizeof(path), "/proc/%lld/stat", static_cast<long long>(pid));
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return errno == ENOENT || errno == ESRCH ? gone() : unknown(errno);
  const ssize_t got = read(file, text, sizeof(text) - 1);
  const int error = got < 0 ? errno : EIO;
  close(file);
  if (got <= 0) return error == ESRCH ? gone() : unknown(error);
  text[got] = 0;
  const char* after = std::strrchr(text, ')');  // the name before it may contain anything, even spaces and brackets
  if (!after || !after[1] || !after[2]) return unknown(EIO);
  const char state = after[2];
  if (state == 'Z' || state == 'X') return gone();
  const char* at = after + 2;  // field 3; the start time is field 22
  for (int field = 3; field < 22; ++field) {
    at = std::strchr(at, ' ');
    if (!at) return unknown(EIO);
    ++at;
  }
  return std::strtoull(at, nullptr, 10);
}

std::uint64_t pid_namespace() {
  struct stat status {};
  return stat("/proc/self/ns/pid", &status) ? 0 : static_cast<std::uint64_t>(status.st_ino);
}

Segment Segment::create(int ranks, std::int64_t slot_bytes, bool named) {
  Segment segment;
  const std::uint64_t nonce = random_bits();
  if (named) {
    remove_leftovers();
    segment.name_ = std::string("/") + kPrefix + owner_of(getpid()) + "-" + hex(random_bits()) + hex(random_bits());
    segment.descriptor_ = shm_open(segment.name_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (segment.descriptor_ < 0) {
      const int error = errno;
      segment.name_.clear();
      fail("cannot create shared memory in /dev/shm", error);
    }
    segment.address_ = "shm:" + segment.name_ + ":" + hex(nonce);
  } else {
    segment.descriptor_ = memfd_create("stoker", MFD_CLOEXEC);
    if (segment.descriptor_ < 0) fail("memfd_create", errno);
    if (fchmod(segment.descriptor_, 0600)) fail("cannot restrict shared memory to this user", errno);
    segment.address_ = "memfd:" + std::to_string(getpid()) + ":" + std::to_string(segment.descriptor_) + ":" + hex(nonce);
  }
  const std::size_t pipes = pipes_offset(ranks, static_cast<std::size_t>(slot_bytes));
  const std::size_t bytes = pipes + pipe_bytes(ranks) * ranks * ranks;
  if (ftruncate(segment.descriptor_, static_cast<off_t>(bytes))) fail("cannot size shared memory", errno);
  if (named) reserve(segment.descriptor_, 0, slots_offset(ranks));
  segment.map(segment.descriptor_, bytes);
  Header& header = *new (segment.base_) Header{};
  header.ranks = static_cast<std::uint32_t>(ranks);
  header.slots = kSlots;
  header.slot_bytes = static_cast<std::uint64_t>(slot_bytes);
  header.pipe_bytes = pipe_bytes(ranks);
  header.bytes = bytes;
  header.nonce = nonce;
  for (int rank = 0; rank < ranks; ++rank) new (&segment.block(rank)) RankBlock{};
  std::atomic_thread_fence(std::memory_order_release);
  header.magic = kMagic;
  return segment;
}

Segment Segment::attach(const std::string& address) {
  Segment segment;
  segment.address_ = address;
  const std::size_t last = address.rfind(':');
  const std::size_t kind = address.find(':');
  if (last == std::string::npos || kind == last) throw Error(STOKER_COMM_ARGUMENT, "not the address of a segment: " + address);
  const std::string middle = address.substr(kind + 1, last - kind - 1);
  int descriptor = -1;
  if (address.compare(0, kind, "shm") == 0) {
    descriptor = shm_open(middle.c_str(), O_RDWR | O_CLOEXEC, 0);
  } else {
    const std::size_t colon = middle.find(':');
    if (colon == std::string::npos) throw Error(STOKER_COMM_ARGUMENT, "not the address of a segment: " + address);
    const std::string path = "/proc/" + middle.substr(0, colon) + "/fd/" + middle.substr(colon + 1);
    descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
  }
  if (descriptor < 0) fail("cannot open the shared memory of the first rank", errno);
  struct stat status {};
  if (fstat(descriptor, &status) || static_cast<std::size_t>(status.st_size) < sizeof(Header)) {
    close(descriptor);
    throw Error(STOKER_COMM_SYSTEM, "the shared memory of the first rank is not a segment");
  }
  // An announcement is only as trustworthy as the store that it came through: what another user can write must not be read.
  if (status.st_uid != geteuid()) {
    close(descriptor);
    throw Error(STOKER_COMM_SYSTEM, "the shared memory of the first rank belongs to another user");
  }
  segment.descriptor_ = descriptor;  // closed by seal(), at the latest
  segment.map(descriptor, static_cast<std::size_t>(status.st_size));
  const Header& header = segment.header();
  // The nonce distinguishes it from the file of a process with the same pid in another pid namespace.
  if (header.magic != kMagic || hex(header.nonce) != address.substr(last + 1) || header.bytes != segment.bytes_)
    throw Error(STOKER_COMM_SYSTEM, "the shared memory of the first rank is not the segment that was announced");
  return segment;
}

void Segment::reserve_slots(int rank) {
  if (address_.compare(0, 4, "shm:") != 0) return;
  const std::size_t bytes = static_cast<std::size_t>(header().slot_bytes) * kSlots;
  reserve(descriptor_, slots_offset(static_cast<int>(header().ranks)) + bytes * rank, bytes);
}

Segment::Segment(Segment&& other) noexcept
    : base_(other.base_), bytes_(other.bytes_), descriptor_(other.descriptor_), address_(other.address_), name_(other.name_) {
  other.base_ = nullptr;
  other.descriptor_ = -1;
  other.name_.clear();
}

Segment::~Segment() {
  seal();
  if (base_) munmap(base_, bytes_);
}

void Segment::map(int descriptor, std::size_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (base == MAP_FAILED) fail("cannot map shared memory", errno);
  base_ = base;
  bytes_ = bytes;
}

void Segment::seal() {
  if (!name_.empty()) shm_unlink(name_.c_str());
  name_.clear();
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
}

RankBlock& Segment::block(int rank) const {
  return *reinterpret_cast<RankBlock*>(static_cast<char*>(base_) + blocks_offset() + sizeof(RankBlock) * rank);
}

char* Segment::slot(int rank, std::uint32_t piece) const {
  const Header& head = header();
  const std::size_t index = static_cast<std::size_t>(rank) * kSlots + piece % kSlots;
  return static_cast<char*>(base_) + slots_offset(static_cast<int>(head.ranks)) + index * head.slot_bytes;
}

Pipe& Segment::pipe(int from, int to) const {
  const Header& head = header();
  const std::size_t index = static_cast<std::size_t>(from) * head.ranks + to;
  return *reinterpret_cast<Pipe*>(static_cast<char*>(base_) + pipes_offset(static_cast<int>(head.ranks), head.slot_bytes) +
                                  index * head.pipe_bytes);
}

void Segment::reserve_pipe(int from, int to) {
#if defined(MADV_POPULATE_WRITE)
  // Kernels before 5.14 answer EINVAL: then the memory is taken when it is written.
  if (!madvise(&pipe(from, to), header().pipe_bytes, MADV_POPULATE_WRITE) || errno == EINVAL) return;
  const int error = errno;
  const std::string what = "cannot reserve " + std::to_string(header().pipe_bytes >> 10) + " KB of shared memory for messages";
  // EFAULT: where a write would be a SIGBUS, because the file system has no room for the page.
  if (error == EFAULT && address_.compare(0, 4, "shm:") == 0)
    throw Error(STOKER_COMM_SYSTEM, what + ": /dev/shm is full; enlarge it, or unset STOKER_CCL_SHM");
  fail(what, error == EFAULT ? ENOMEM : error);
#else
  (void)from, (void)to;
#endif
}

}  // namespace stoker::comm
