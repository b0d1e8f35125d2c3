/* Preloaded into a process, makes one of its system calls on chosen paths fail.

   faults_arm(roots, nth, code, log) starts: calls on paths below one of the roots (parted by ':') are counted from 1;
   call `nth` fails with errno `code` and is not made (a close is made and reports the error). With nth 0 none fails.
   Each call (nth 0) or the one that failed is a line in `log`: number, call, path. faults_disarm() ends it and returns
   how many calls there were. A fork counts on with its parent. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define MAX_ROOTS 8

static char roots[MAX_ROOTS][PATH_MAX];
static int root_count;
static atomic_long *calls;
static long failing;
static int failing_code;
static int log_descriptor = -1;
static atomic_int armed;

void faults_arm(const char *paths, long nth, int code, const char *log)
{
    root_count = 0;
    while (*paths && root_count < MAX_ROOTS) {
        size_t length = strcspn(paths, ":");
        if (length && length < PATH_MAX) {
            memcpy(roots[root_count], paths, length);
            roots[root_count++][length] = 0;
        }
        paths += length + (paths[length] == ':');
    }
    calls = (atomic_long *)syscall(SYS_mmap, NULL, sizeof *calls, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    failing = nth;
    failing_code = code;
    int opened = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    /* Out of the way: the process must not notice a descriptor more. */
    log_descriptor = syscall(SYS_fcntl, opened, F_DUPFD_CLOEXEC, 900);
    syscall(SYS_close, opened);
    armed = 1;
}

long faults_disarm(void)
{
    armed = 0;
    return *calls;
}

static void of_descriptor(int descriptor, char *path)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    path[length > 0 ? length : 0] = 0;
}

static int is_below_root(const char *path)
{
    for (int i = 0; i < root_count; i++) {
        size_t length = strlen(roots[i]);
        if (!strncmp(path, roots[i], length) && (path[length] == '/' || path[length] == 0))
            return 1;
    }
    return 0;
}

/* The errno to fail with, or 0. `path` may be NULL: the call is on the descriptor itself. */
static int fault(const char *call, int folder, const char *path)
{
    char full[2 * PATH_MAX + 2];
    int before = errno;
    if (!armed || (!path && folder < 0))
        return 0;
    if (!path || path[0] == 0)
        of_descriptor(folder, full);
    else if (path[0] == '/')
        snprintf(full, sizeof full, "%.*s", PATH_MAX, path);
    else {
        if (folder != AT_FDCWD)
            of_descriptor(folder, full);
        else if (syscall(SYS_getcwd, full, PATH_MAX) < 0)
            full[0] = 0;
        size_t length = strlen(full);
        snprintf(full + length, sizeof full - length, "/%.*s", PATH_MAX, path);
    }
    errno = before;
    if (!is_below_root(full))
        return 0;
    long number = atomic_fetch_add(calls, 1) + 1;
    if (failing && number != failing)
        return 0;
    char line[2 * PATH_MAX + 64];
    int size = snprintf(line, sizeof line, "%ld %s %s\n", number, call, full);
    syscall(SYS_write, log_descriptor, line, size);
    errno = before;
    return failing ? failing_code : 0;
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

#define FAIL(call, folder, path, result) \
    do { \
        int code = fault(call, folder, path); \
        if (code) { errno = code; return result; } \
    } while (0)

#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | __O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }

int open(const char *path, int flags, ...) { MODE(flags) REAL(open); FAIL("open", AT_FDCWD, path, -1); return real(path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) REAL(open64); FAIL("open", AT_FDCWD, path, -1); return real(path, flags, mode); }
int openat(int f, const char *path, int flags, ...) { MODE(flags) REAL(openat); FAIL("open", f, path, -1); return real(f, path, flags, mode); }
int openat64(int f, const char *path, int flags, ...) { MODE(flags) REAL(openat64); FAIL("open", f, path, -1); return real(f, path, flags, mode); }
FILE *fopen(const char *path, const char *m) { REAL(fopen); FAIL("open", AT_FDCWD, path, NULL); return real(path, m); }
FILE *fopen64(const char *path, const char *m) { REAL(fopen64); FAIL("open", AT_FDCWD, path, NULL); return real(path, m); }
int close(int f) { REAL(close); int code = fault("close", f, NULL); int done = real(f); if (code) { errno = code; return -1; } return done; }

int stat(const char *path, struct stat *s) { REAL(stat); FAIL("stat", AT_FDCWD, path, -1); return real(path, s); }
int stat64(const char *path, struct stat64 *s) { REAL(stat64); FAIL("stat", AT_FDCWD, path, -1); return real(path, s); }
int lstat(const char *path, struct stat *s) { REAL(lstat); FAIL("lstat", AT_FDCWD, path, -1); return real(path, s); }
int lstat64(const char *path, struct stat64 *s) { REAL(lstat64); FAIL("lstat", AT_FDCWD, path, -1); return real(path, s); }
int fstat(int f, struct stat *s) { REAL(fstat); FAIL("fstat", f, NULL, -1); return real(f, s); }
int fstat64(int f, struct stat64 *s) { REAL(fstat64); FAIL("fstat", f, NULL, -1); return real(f, s); }
int fstatat(int f, const char *path, struct stat *s, int flags) { REAL(fstatat); FAIL("stat", f, path, -1); return real(f, path, s, flags); }
int fstatat64(int f, const char *path, struct stat64 *s, int flags) { REAL(fstatat64); FAIL("stat", f, path, -1); return real(f, path, s, flags); }
int statx(int f, const char *path, int flags, unsigned mask, struct statx *s) { REAL(statx); FAIL("stat", f, path, -1); return real(f, path, flags, mask, s); }
int access(const char *path, int mode) { REAL(access); FAIL("access", AT_FDCWD, path, -1); return real(path, mode); }
int faccessat(int f, const char *path, int mode, int flags) { REAL(faccessat); FAIL("access", f, path, -1); return real(f, path, mode, flags); }
ssize_t readlink(const char *path, char *b, size_t n) { REAL(readlink); FAIL("readlink", AT_FDCWD, path, -1); return real(path, b, n); }
ssize_t readlinkat(int f, const char *path, char *b, size_t n) { REAL(readlinkat); FAIL("readlink", f, path, -1); return real(f, path, b, n); }
int statvfs(const char *path, struct statvfs *s) { REAL(statvfs); FAIL("statvfs", AT_FDCWD, path, -1); return real(path, s); }
int statvfs64(const char *path, struct statvfs64 *s) { REAL(statvfs64); FAIL("statvfs", AT_FDCWD, path, -1); return real(path, s); }

DIR *opendir(const char *path) { REAL(opendir); FAIL("opendir", AT_FDCWD, path, NULL); return real(path); }
DIR *fdopendir(int f) { REAL(fdopendir); FAIL("opendir", f, NULL, NULL); return real(f); }
struct dirent *readdir(DIR *d) { REAL(readdir); FAIL("readdir", dirfd(d), NULL, NULL); return real(d); }
struct dirent64 *readdir64(DIR *d) { REAL(readdir64); FAIL("readdir", dirfd(d), NULL, NULL); return real(d); }

ssize_t read(int f, void *b, size_t n) { REAL(read); FAIL("read", f, NULL, -1); return real(f, b, n); }
ssize_t pread(int f, void *b, size_t n, off_t o) { REAL(pread); FAIL("read", f, NULL, -1); return real(f, b, n, o); }
ssize_t pread64(int f, void *b, size_t n, off64_t o) { REAL(pread64); FAIL("read", f, NULL, -1); return real(f, b, n, o); }
ssize_t preadv(int f, const struct iovec *v, int n, off_t o) { REAL(preadv); FAIL("read", f, NULL, -1); return real(f, v, n, o); }
ssize_t preadv64(int f, const struct iovec *v, int n, off64_t o) { REAL(preadv64); FAIL("read", f, NULL, -1); return real(f, v, n, o); }

ssize_t preadv2(int f, const struct iovec *v, int n, off_t o, int g) { REAL(preadv2); FAIL("read", f, NULL, -1); return real(f, v, n, o, g); }
ssize_t preadv64v2(int f, const struct iovec *v, int n, off64_t o, int g) { REAL(preadv64v2); FAIL("read", f, NULL, -1); return real(f, v, n, o, g); }
void *mmap(void *a, size_t n, int p, int g, int f, off_t o) { REAL(mmap); if (!(g & MAP_ANONYMOUS)) FAIL("mmap", f, NULL, MAP_FAILED); return real(a, n, p, g, f, o); }
void *mmap64(void *a, size_t n, int p, int g, int f, off64_t o) { REAL(mmap64); if (!(g & MAP_ANONYMOUS)) FAIL("mmap", f, NULL, MAP_FAILED); return real(a, n, p, g, f, o); }
off_t lseek(int f, off_t o, int w) { REAL(lseek); FAIL("lseek", f, NULL, -1); return real(f, o, w); }
off64_t lseek64(int f, off64_t o, int w) { REAL(lseek64); FAIL("lseek", f, NULL, -1); return real(f, o, w); }

ssize_t readv(int f, const struct iovec *v, int n) { REAL(readv); FAIL("read", f, NULL, -1); return real(f, v, n); }
ssize_t write(int f, const void *b, size_t n) { REAL(write); FAIL("write", f, NULL, -1); return real(f, b, n); }
ssize_t pwrite(int f, const void *b, size_t n, off_t o) { REAL(pwrite); FAIL("write", f, NULL, -1); return real(f, b, n, o); }
ssize_t pwrite64(int f, const void *b, size_t n, off64_t o) { REAL(pwrite64); FAIL("write", f, NULL, -1); return real(f, b, n, o); }
ssize_t writev(int f, const struct iovec *v, int n) { REAL(writev); FAIL("write", f, NULL, -1); return real(f, v, n); }
int fsync(int f) { REAL(fsync); FAIL("fsync", f, NULL, -1); return real(f); }
int fdatasync(int f) { REAL(fdatasync); FAIL("fsync", f, NULL, -1); return real(f); }
int ftruncate(int f, off_t n) { REAL(ftruncate); FAIL("truncate", f, NULL, -1); return real(f, n); }
int ftruncate64(int f, off64_t n) { REAL(ftruncate64); FAIL("truncate", f, NULL, -1); return real(f, n); }
int flock(int f, int how) { REAL(flock); FAIL("flock", f, NULL, -1); return real(f, how); }
int fchmod(int f, mode_t m) { REAL(fchmod); FAIL("chmod", f, NULL, -1); return real(f, m); }
int chmod(const char *path, mode_t m) { REAL(chmod); FAIL("chmod", AT_FDCWD, path, -1); return real(path, m); }
int fchmodat(int f, const char *path, mode_t m, int g) { REAL(fchmodat); FAIL("chmod", f, path, -1); return real(f, path, m, g); }

int rename(const char *a, const char *b) { REAL(rename); FAIL("rename", AT_FDCWD, a, -1); return real(a, b); }
int renameat(int f, const char *a, int g, const char *b) { REAL(renameat); FAIL("rename", f, a, -1); return real(f, a, g, b); }
int renameat2(int f, const char *a, int g, const char *b, unsigned o) { REAL(renameat2); FAIL("rename", f, a, -1); return real(f, a, g, b, o); }
int unlink(const char *path) { REAL(unlink); FAIL("unlink", AT_FDCWD, path, -1); return real(path); }
int unlinkat(int f, const char *path, int flags) { REAL(unlinkat); FAIL("unlink", f, path, -1); return real(f, path, flags); }
int mkdir(const char *path, mode_t m) { REAL(mkdir); FAIL("mkdir", AT_FDCWD, path, -1); return real(path, m); }
int mkdirat(int f, const char *path, mode_t m) { REAL(mkdirat); FAIL("mkdir", f, path, -1); return real(f, path, m); }
int rmdir(const char *path) { REAL(rmdir); FAIL("rmdir", AT_FDCWD, path, -1); return real(path); }
int link(const char *a, const char *b) { REAL(link); FAIL("link", AT_FDCWD, a, -1); return real(a, b); }
int symlink(const char *a, const char *b) { REAL(symlink); FAIL("symlink", AT_FDCWD, b, -1); return real(a, b); }
