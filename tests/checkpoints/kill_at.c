// Preloaded: kills the process at the n-th call that changes a file below a directory.
//
// watch(directory, n): from now on; 0 counts and kills nobody. counted(): calls so far. A write
// counts twice: before it, and after its first half.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static char root[4096];
static long kill_at, count;

void watch(const char* directory, long n) {
  strncpy(root, directory, sizeof root - 1);
  kill_at = n;
  count = 0;
}

long counted(void) { return count; }

static int reached(void) { return ++count == kill_at; }

static void die(void) { kill(getpid(), SIGKILL); }

static int below_path(const char* path) { return *root && !strncmp(path, root, strlen(root)); }

static int below(int fd) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n < 0) return 0;
  path[n] = 0;
  return below_path(path);
}

static int at(int dir, const char* path) { return *path == '/' ? below_path(path) : below(dir); }

static void point(int counts) {
  if (counts && reached()) die();
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPEN(name)                                                          \
  int name(const char* path, int flags, ...) {                              \
    va_list rest;                                                           \
    va_start(rest, flags);                                                  \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
    va_end(rest);                                                           \
    point((flags & O_CREAT) && below_path(path));                           \
    return REAL(name)(path, flags, mode);                                   \
  }
OPEN(open)
OPEN(open64)

ssize_t write(int fd, const void* data, size_t size) {
  if (!below(fd)) return REAL(write)(fd, data, size);
  point(1);
  if (reached()) {
    REAL(write)(fd, data, size / 2);
    die();
  }
  return REAL(write)(fd, data, size);
}

int fsync(int fd) {
  point(below(fd));
  return REAL(fsync)(fd);
}

int rename(const char* from, const char* to) {
  point(below_path(from));
  return REAL(rename)(from, to);
}

int mkdir(const char* path, mode_t mode) {
  point(below_path(path));
  return REAL(mkdir)(path, mode);
}

int rmdir(const char* path) {
  point(below_path(path));
  return REAL(rmdir)(path);
}

int unlink(const char* path) {
  point(below_path(path));
  return REAL(unlink)(path);
}

int unlinkat(int dir, const char* path, int flags) {
  point(at(dir, path));
  return REAL(unlinkat)(dir, path, flags);
}
