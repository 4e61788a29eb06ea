// Names of hosts; see base/identity.h.
#include "base/identity.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <mutex>

#include "base/error.h"

namespace axo {
namespace {

std::mutex g_mutex;
std::string g_name;  // of the host that this process plays, or ""

std::string read_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string read_link(const char* path) {
  char text[256];
  const ssize_t n = ::readlink(path, text, sizeof(text));
  return n > 0 ? std::string(text, static_cast<std::size_t>(n)) : std::string();
}

}  // namespace

void simulate_host(const std::string& name) {
  const bool plain =
      name.size() < 64 && std::all_of(
                              name.begin(), name.end(),
                              [](unsigned char c) { return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.'; });
  AXO_CHECK(plain, "host name", "'" + name + "'", "letters, digits, '-', '_' and '.'");
  std::lock_guard<std::mutex> lock(g_mutex);
  g_name = name;
}

std::string host_name() {
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    if (!g_name.empty()) return g_name;
  }
  utsname names{};
  ::uname(&names);
  return names.nodename[0] == '\0' ? "unnamed" : names.nodename;
}

std::string boot_id() { return read_line("/proc/sys/kernel/random/boot_id"); }

std::string host_identity() {
  return host_name() + " " + boot_id() + " " + read_link("/proc/self/ns/net") + " uid " + std::to_string(::geteuid());
}

std::string process_space() {
  const std::string link = read_link("/proc/self/ns/pid");
  return link.empty() ? "unknown" : link;
}

std::string hex_digits(const unsigned char* bytes, std::size_t count) {
  static const char* kDigits = "0123456789abcdef";
  std::string text;
  for (std::size_t i = 0; i < count; ++i) text += {kDigits[bytes[i] >> 4], kDigits[bytes[i] & 15]};
  return text;
}

}  // namespace axo
