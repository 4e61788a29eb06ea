// Records what processes do to one folder, so that a test can replay any part of it: what would be on the disk, had the
// power failed there. Loaded with LD_PRELOAD, so that it sees every write, sync and rename, whoever makes it.
//
// AXO_TRACE_ROOT: the folder. AXO_TRACE_LOG: the record; one lock over all processes keeps it in the order of the
// operations. A record is a Header, two paths and data.

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

namespace {

struct Header {
  char operation;  // c create, t truncate, w write, s sync, m mkdir, d remove, r rename, x exchange
  char unused[3];
  int32_t path, path2;
  int64_t offset, data;
};

template <typename F>
F real(const char* name, F) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}
#define REAL(name) static const auto next = real(#name, static_cast<decltype(&::name)>(nullptr))

const char* root() {
  static const char* value = getenv("AXO_TRACE_ROOT");
  return value;
}

bool traced(const std::string& path) {
  if (root() == nullptr) return false;
  const std::string start(root());
  return path == start || path.compare(0, start.size() + 1, start + "/") == 0;
}

std::string of_descriptor(int descriptor) {
  char path[PATH_MAX];
  const ssize_t length = readlink(("/proc/self/fd/" + std::to_string(descriptor)).c_str(), path, sizeof path);
  return length > 0 ? std::string(path, static_cast<size_t>(length)) : "";
}

std::string absolute(int folder, const char* path) {
  if (path[0] == '/') return path;
  char here[PATH_MAX];
  const std::string base = folder == AT_FDCWD ? std::string(getcwd(here, sizeof here)) : of_descriptor(folder);
  return base + "/" + path;
}

// Held over an operation and its record: no other process's comes between.
class Recorder {
 public:
  Recorder() : lock_(mutex()) { flock(log(), LOCK_EX); }
  ~Recorder() {
    const int error = errno;
    flock(log(), LOCK_UN);
    errno = error;
  }
  void add(char operation, const std::string& path, const std::string& path2 = "", int64_t offset = 0,
           const void* data = nullptr, size_t size = 0) {
    static const auto next = real("write", static_cast<decltype(&::write)>(nullptr));
    const int error = errno;
    Header header{operation, {}, int32_t(path.size()), int32_t(path2.size()), offset, int64_t(size)};
    std::string record(reinterpret_cast<const char*>(&header), sizeof header);
    record += path + path2 + std::string(static_cast<const char*>(data), size);
    if (next(log(), record.data(), record.size()) != ssize_t(record.size())) abort();
    errno = error;
  }

 private:
  static std::recursive_mutex& mutex() {
    static std::recursive_mutex one;
    return one;
  }
  static int log() {
    static const auto next = real("open", static_cast<decltype(&::open)>(nullptr));
    static const int file = next(getenv("AXO_TRACE_LOG"), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    return file;
  }
  std::lock_guard<std::recursive_mutex> lock_;
};

template <typename Call>
int opening(const std::string& path, int flags, Call call) {
  if (!(flags & (O_CREAT | O_TRUNC)) || !traced(path)) return call();
  Recorder recorder;
  struct stat before;
  const bool existed = stat(path.c_str(), &before) == 0;
  const int result = call();
  if (result >= 0 && !existed) recorder.add('c', path);
  if (result >= 0 && existed && (flags & O_TRUNC)) recorder.add('t', path);
  return result;
}

template <typename Call>
int named(char operation, const std::string& path, const std::string& path2, Call call) {
  if (!traced(path) && !traced(path2)) return call();
  Recorder recorder;
  const int result = call();
  if (result == 0) recorder.add(operation, path, path2);
  return result;
}

template <typename Call>
ssize_t writing(int file, int64_t offset, const void* data, Call call) {
  const std::string path = of_descriptor(file);
  if (!traced(path)) return call();
  Recorder recorder;
  if (offset < 0) offset = lseek(file, 0, fcntl(file, F_GETFL) & O_APPEND ? SEEK_END : SEEK_CUR);
  const ssize_t written = call();
  if (written > 0) recorder.add('w', path, "", offset, data, size_t(written));
  return written;
}

}  // namespace

#define MODE                                   \
  mode_t mode = 0;                             \
  if (flags & (O_CREAT | __O_TMPFILE)) {       \
    va_list list;                              \
    va_start(list, flags);                     \
    mode = mode_t(va_arg(list, unsigned int)); \
    va_end(list);                              \
  }
#define OPEN(name)                                                                            \
  int name(const char* path, int flags, ...) {                                                \
    MODE REAL(name);                                                                          \
    return opening(absolute(AT_FDCWD, path), flags, [&] { return next(path, flags, mode); }); \
  }
#define OPENAT(name)                                                                                \
  int name(int folder, const char* path, int flags, ...) {                                          \
    MODE REAL(name);                                                                                \
    return opening(absolute(folder, path), flags, [&] { return next(folder, path, flags, mode); }); \
  }

extern "C" {
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int file, const void* data, size_t size) {
  REAL(write);
  return writing(file, -1, data, [&] { return next(file, data, size); });
}
ssize_t pwrite(int file, const void* data, size_t size, off_t offset) {
  REAL(pwrite);
  return writing(file, offset, data, [&] { return next(file, data, size, offset); });
}
ssize_t pwrite64(int file, const void* data, size_t size, off64_t offset) {
  REAL(pwrite64);
  return writing(file, offset, data, [&] { return next(file, data, size, offset); });
}
ssize_t writev(int file, const struct iovec* parts, int count) {
  REAL(writev);
  std::string all;
  for (int part = 0; part < count; ++part) all.append(static_cast<char*>(parts[part].iov_base), parts[part].iov_len);
  return writing(file, -1, all.data(), [&] { return next(file, parts, count); });
}
int fsync(int file) {
  REAL(fsync);
  return named('s', of_descriptor(file), "", [&] { return next(file); });
}
int fdatasync(int file) {
  REAL(fdatasync);
  return named('s', of_descriptor(file), "", [&] { return next(file); });
}
int mkdir(const char* path, mode_t mode) {
  REAL(mkdir);
  return named('m', absolute(AT_FDCWD, path), "", [&] { return next(path, mode); });
}
int mkdirat(int folder, const char* path, mode_t mode) {
  REAL(mkdirat);
  return named('m', absolute(folder, path), "", [&] { return next(folder, path, mode); });
}
int unlink(const char* path) {
  REAL(unlink);
  return named('d', absolute(AT_FDCWD, path), "", [&] { return next(path); });
}
int rmdir(const char* path) {
  REAL(rmdir);
  return named('d', absolute(AT_FDCWD, path), "", [&] { return next(path); });
}
int unlinkat(int folder, const char* path, int flags) {
  REAL(unlinkat);
  return named('d', absolute(folder, path), "", [&] { return next(folder, path, flags); });
}
int rename(const char* from, const char* to) {
  REAL(rename);
  return named('r', absolute(AT_FDCWD, from), absolute(AT_FDCWD, to), [&] { return next(from, to); });
}
int renameat(int folder, const char* from, int folder2, const char* to) {
  REAL(renameat);
  return named('r', absolute(folder, from), absolute(folder2, to), [&] { return next(folder, from, folder2, to); });
}
int renameat2(int folder, const char* from, int folder2, const char* to, unsigned int flags) {
  REAL(renameat2);
  return named(flags & RENAME_EXCHANGE ? 'x' : 'r', absolute(folder, from), absolute(folder2, to),
               [&] { return next(folder, from, folder2, to, flags); });
}
}
