// Names of hosts; see base/identity.h.
#include "base/identity.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "base/error.h"

namespace axo {
namespace {

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

std::string host_name() {
  if (const char* told = std::getenv("AXO_HOST"); told != nullptr && *told != '\0') {
    const bool plain = std::strlen(told) < 64 &&
                       std::all_of(
                           told, told + std::strlen(told),
                           [](unsigned char c) { return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.'; });
    AXO_CHECK(plain, "AXO_HOST", std::string("'") + told + "'", "a name of letters, digits, '-', '_' and '.'");
    return told;
  }
  if (const char* told = std::getenv("AXO_RANKS_PER_HOST"); told != nullptr && *told != '\0') {
    const char* rank = std::getenv("RANK");
    char* end = nullptr;
    const long count = std::strtol(told, &end, 10);
    AXO_CHECK(count > 0 && count <= 1 << 20 && *end == '\0', "AXO_RANKS_PER_HOST", std::string("'") + told + "'",
              "a number of ranks");
    AXO_CHECK(rank != nullptr, "AXO_RANKS_PER_HOST", "no RANK in the environment", "a launcher that sets it");
    return "host" + std::to_string(std::strtol(rank, nullptr, 10) / count);
  }
  utsname names{};
  ::uname(&names);
  return names.nodename;
}

std::string host_identity() {
  return host_name() + " " + read_line("/proc/sys/kernel/random/boot_id") + " " + read_link("/proc/self/ns/net") +
         " uid " + std::to_string(::geteuid());
}

std::string process_space() {
  const std::string link = read_link("/proc/self/ns/pid");
  return link.empty() ? "unknown" : link;
}

}  // namespace axo
