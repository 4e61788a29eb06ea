// Shared libraries found and opened at run time: the copy that the process already uses, before any other.
//
// A GPU runtime and its collective library keep state of their own, so a second copy beside the one that torch uses
// would be wrong. Order of the search:
//   1. the loaded objects (dl_iterate_phdr), by file name: `libnccl.so`, `libnccl.so.2`, never `libnccl-net.so`;
//   2. `override_path` (AXO_NCCL_LIBRARY), when set. Another copy than the loaded one is refused, and both are named;
//   3. what the loader knows under the plain names (RTLD_NOLOAD);
//   4. `folders`, then the folders where pip puts the vendors' wheels, beside the torch that is loaded and beside Axo;
//   5. the system's search path.
// It never unloads: the functions that it hands out stay valid for the life of the process.
#pragma once

#include <string>
#include <vector>

namespace axo {

struct LibraryRequest {
  std::string stem;                        // "libnccl.so": file names are the stem, or the stem and a version
  std::vector<std::string> names;          // for the loader, newest first: {"libnccl.so.2", "libnccl.so"}
  std::vector<std::string> wheel_folders;  // inside site-packages: {"nvidia/nccl/lib"}
  std::string override_path;
  const char* override_variable = "";  // where override_path came from, for messages
  std::vector<std::string> folders;    // searched before the wheels; tests
};

class DynamicLibrary {
 public:
  // Throws Error that lists what was tried.
  static DynamicLibrary open(const LibraryRequest& request);
  // The same without an error: an empty library when there is none.
  static DynamicLibrary find(const LibraryRequest& request, std::string* tried = nullptr);

  explicit operator bool() const { return handle_ != nullptr; }
  const std::string& path() const { return path_; }
  // Before this opened it, by whomever.
  bool was_loaded() const { return was_loaded_; }
  // Null when the library has no such function.
  void* symbol(const std::string& name) const;
  // Throws Error that names the library and the function.
  void* required(const std::string& name) const;
  // The same, into a pointer to a function.
  template <class Function>
  void load(Function** function, const std::string& name) const {
    *function = reinterpret_cast<Function*>(required(name));
  }
  template <class Function>
  void try_load(Function** function, const std::string& name) const {
    *function = reinterpret_cast<Function*>(symbol(name));
  }

 private:
  void* handle_ = nullptr;
  bool was_loaded_ = false;
  std::string path_;
};

// Paths of the loaded objects whose file name is `stem`, or `stem` and a version; each file once.
std::vector<std::string> loaded_objects(const std::string& stem);
// Whether two paths are one file.
bool same_file(const std::string& a, const std::string& b);

}  // namespace axo
