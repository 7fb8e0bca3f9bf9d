// Preloaded by tests/kernels/arm.py. QEMU's user mode invents /proc/PID/stat, with another start time for every thread, from which the
// library would conclude that the process has died and its pid was reused. A file that cannot be read is no sign of death.
#include <cerrno>
#include <cstdarg>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>

extern "C" int open(const char* path, int flags, ...) {
  const std::size_t length = std::strlen(path);
  if (!std::strncmp(path, "/proc/", 6) && length > 5 && !std::strcmp(path + length - 5, "/stat")) {
    errno = EACCES;
    return -1;
  }
  va_list arguments;
  va_start(arguments, flags);
  const int mode = va_arg(arguments, int);
  va_end(arguments);
  static const auto real = reinterpret_cast<int (*)(const char*, int, ...)>(dlsym(RTLD_NEXT, "open"));
  return real(path, flags, mode);
}
