// memfd, seals, mmap; see memory/segment.h.
#include "memory/segment.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>

#include "base/error.h"

namespace axo {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void fail(const std::string& what, int error) {
  const char* limit = error == EFBIG ? " (ulimit -f)" : error == EMFILE ? " (ulimit -n)" : "";
  throw ResourceError("shared memory: " + what + ": " + std::strerror(error) + limit);
}

// The mappings of this process by inode. Private to the process: a forked child starts with an empty table.
struct Table {
  std::mutex mutex;
  std::map<std::pair<dev_t, ino_t>, std::weak_ptr<Mapping>> mappings;
  int pid = ::getpid();
};

Table& table() {
  static Table* current = new Table;
  if (current->pid != ::getpid()) {
    // The forked copy may hold a locked mutex: leave it alone.
    current = new Table;
  }
  return *current;
}

}  // namespace

Fd::~Fd() {
  if (fd_ >= 0) ::close(fd_);
}

Mapping::Mapping(void* base, std::size_t bytes) : base_(static_cast<char*>(base)), bytes_(bytes), pid_(::getpid()) {}

Mapping::~Mapping() {
  if (pid_ == ::getpid()) ::munmap(base_, bytes_);
}

Fd create_segment(const char* label, std::size_t bytes) {
  Fd fd(static_cast<int>(::syscall(SYS_memfd_create, label, MFD_CLOEXEC | MFD_ALLOW_SEALING)));
  if (!fd) fail("memfd_create", errno);
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    fail("cannot size a segment of " + std::to_string(bytes) + " bytes", errno);
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) fail("cannot seal a segment", errno);
  return fd;
}

std::shared_ptr<Mapping> map_segment(int fd, std::size_t bytes) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW)) {
    throw Error("shared memory: the descriptor is not a memfd of sealed size");
  }
  struct stat info{};
  if (::fstat(fd, &info) != 0) fail("fstat", errno);
  AXO_CHECK(info.st_size >= 0 && static_cast<std::size_t>(info.st_size) == bytes, "shared memory: bytes of the segment",
            info.st_size, std::to_string(bytes));
  Table& t = table();
  std::lock_guard<std::mutex> lock(t.mutex);
  for (auto it = t.mappings.begin(); it != t.mappings.end();) {
    it = it->second.expired() ? t.mappings.erase(it) : std::next(it);
  }
  std::weak_ptr<Mapping>& known = t.mappings[{info.st_dev, info.st_ino}];
  if (auto mapping = known.lock()) return mapping;
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) fail("cannot map a segment of " + std::to_string(bytes) + " bytes", errno);
  ::madvise(base, bytes, MADV_DONTFORK);
  auto mapping = std::make_shared<Mapping>(base, bytes);
  known = mapping;
  return mapping;
}

}  // namespace axo
