#include "device/dynamic_library.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/stat.h>

#include <algorithm>
#include <mutex>

#include "base/error.h"

namespace axo {
namespace {

std::string file_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }

std::string folder_of(const std::string& path) {
  const auto slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

bool has_stem(const std::string& path, const std::string& stem) {
  const std::string name = file_name(path);
  return name == stem || name.compare(0, stem.size() + 1, stem + ".") == 0;
}

std::string join(const std::vector<std::string>& parts, const char* separator) {
  std::string all;
  for (const auto& part : parts) all += (all.empty() ? "" : separator) + part;
  return all;
}

struct Walk {
  const std::string* stem;
  std::vector<std::string>* found;
};

int visit(dl_phdr_info* info, std::size_t, void* data) {
  auto& walk = *static_cast<Walk*>(data);
  const std::string path = info->dlpi_name ? info->dlpi_name : "";
  if (has_stem(path, *walk.stem)) {
    const auto same = [&](const std::string& other) { return same_file(path, other); };
    if (std::none_of(walk.found->begin(), walk.found->end(), same)) walk.found->push_back(path);
  }
  return 0;
}

// Where pip may have put the vendor's wheels: site-packages beside torch (torch/lib/libc10.so) and beside Axo
// (axo/_C.so).
std::vector<std::string> site_packages() {
  std::vector<std::string> roots;
  for (const auto& torch : loaded_objects("libc10.so")) roots.push_back(folder_of(torch) + "/../..");
  Dl_info own{};
  if (dladdr(reinterpret_cast<const void*>(&loaded_objects), &own) && own.dli_fname) {
    roots.push_back(folder_of(own.dli_fname) + "/..");
  }
  return roots;
}

std::string path_of(void* handle, const std::string& fallback) {
  link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map && map->l_name && *map->l_name) return map->l_name;
  return fallback;
}

}  // namespace

bool same_file(const std::string& a, const std::string& b) {
  if (a == b) return true;
  struct stat x{}, y{};
  return stat(a.c_str(), &x) == 0 && stat(b.c_str(), &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

std::vector<std::string> loaded_objects(const std::string& stem) {
  std::vector<std::string> found;
  Walk walk{&stem, &found};
  dl_iterate_phdr(visit, &walk);
  return found;
}

DynamicLibrary DynamicLibrary::find(const LibraryRequest& request, std::string* tried) {
  static std::mutex mutex;  // what is loaded must not change between the look and the opening
  std::lock_guard<std::mutex> lock(mutex);
  const auto loaded = loaded_objects(request.stem);
  if (loaded.size() > 1) {
    throw Error("two copies of " + request.stem + " are loaded in this process: " + join(loaded, " and ") +
                "; each has its own state, so remove one of them");
  }
  const std::string& wanted = request.override_path;
  if (!loaded.empty() && !wanted.empty() && !same_file(loaded[0], wanted)) {
    throw Error(std::string(request.override_variable) + "=" + wanted + " would be a second copy beside " + loaded[0] +
                ", which this process already uses; unset it, or make it the same file");
  }

  DynamicLibrary library;
  library.was_loaded_ = !loaded.empty();
  std::vector<std::string> attempts;
  const auto attempt = [&](const std::string& path, int flags) {
    if (library.handle_) return;
    library.handle_ = dlopen(path.c_str(), flags);
    if (library.handle_) {
      library.path_ = path_of(library.handle_, path);
    } else {
      const char* why = dlerror();
      // With RTLD_NOLOAD "not loaded" is the normal answer.
      if (!(flags & RTLD_NOLOAD)) attempts.push_back(why ? why : path);
    }
  };

  constexpr int kOpen = RTLD_NOW | RTLD_LOCAL;
  if (!loaded.empty()) attempt(loaded[0], kOpen | RTLD_NOLOAD);
  if (!wanted.empty()) {
    attempt(wanted, kOpen);
  } else {
    for (const auto& name : request.names) attempt(name, kOpen | RTLD_NOLOAD);
    std::vector<std::string> folders = request.folders;
    for (const auto& root : site_packages()) {
      for (const auto& folder : request.wheel_folders) folders.push_back(root + "/" + folder);
    }
    for (const auto& folder : folders) {
      for (const auto& name : request.names) attempt(folder + "/" + name, kOpen);
    }
    for (const auto& name : request.names) attempt(name, kOpen);
  }
  if (tried) *tried = join(attempts, "; ");
  return library;
}

DynamicLibrary DynamicLibrary::open(const LibraryRequest& request) {
  std::string tried;
  DynamicLibrary library = find(request, &tried);
  if (!library) throw Error("cannot open " + request.stem + ": " + tried);
  return library;
}

void* DynamicLibrary::symbol(const std::string& name) const { return handle_ ? dlsym(handle_, name.c_str()) : nullptr; }

void* DynamicLibrary::required(const std::string& name) const {
  void* address = symbol(name);
  if (!address) throw Error(path_ + " has no function " + name + ": it is too old for Axo, or not what its name says");
  return address;
}

}  // namespace axo
