// Which host a process is on.
#pragma once

#include <cstddef>
#include <string>

namespace axo {

// What this process's host is called: its hostname, or the name that simulate_host has given it.
std::string host_name();
// For tests and benches: this process plays one on a host of this name; "": no more. Throws Error for a name that is
// not of letters, digits, '-', '_' and '.', or too long.
void simulate_host(const std::string& name);
std::string boot_id();  // of this kernel, or "" where it is not to be read
// That name, boot id, network namespace and user: two ranks that differ in it are not on one host.
std::string host_identity();
std::string process_space();  // the namespace of process ids, never empty

// Of the sources that this program was compiled from; the build writes it.
const char* sources_digest();

std::string hex_digits(const unsigned char* bytes, std::size_t count);

}  // namespace axo
