/* Takes over write and pwrite for files under TETHER_FAULT_FOLDER; see fault.rs. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static void sleep_ms(long ms) {
    struct timespec t = {ms / 1000, (ms % 1000) * 1000000L};
    while (nanosleep(&t, &t) != 0 && errno == EINTR) {}
}

static int concerns(int fd) {
    const char *folder = getenv("TETHER_FAULT_FOLDER");
    char link[64], path[4096];
    if (folder == NULL) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n <= 0) return 0;
    path[n] = 0;
    size_t len = strlen(folder);
    return strncmp(path, folder, len) == 0 && path[len] == '/';
}

/* 0: go on; otherwise the errno to fail with. */
static int suffer(int fd) {
    if (!concerns(fd)) return 0;
    const char *control = getenv("TETHER_FAULT_CONTROL");
    if (control == NULL) return 0;
    for (;;) {
        char word[64] = {0};
        int file = open(control, O_RDONLY | O_CLOEXEC);
        if (file < 0) return 0;
        ssize_t n = read(file, word, sizeof word - 1);
        close(file);
        if (n < 0) return 0;
        if (strcmp(word, "hold") == 0) {
            sleep_ms(2);
            continue;
        }
        if (strcmp(word, "full") == 0) return ENOSPC;
        if (strncmp(word, "every ", 6) == 0) {
            static unsigned long writes;
            if (__atomic_add_fetch(&writes, 1, __ATOMIC_RELAXED) % strtoul(word + 6, NULL, 10) == 0) return ENOSPC;
        }
        if (strncmp(word, "delay ", 6) == 0) sleep_ms(atol(word + 6));
        return 0;
    }
}

ssize_t write(int fd, const void *data, size_t size) {
    int saved = errno, error = suffer(fd);
    errno = error != 0 ? error : saved;
    return error != 0 ? -1 : syscall(SYS_write, fd, data, size);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    int saved = errno, error = suffer(fd);
    errno = error != 0 ? error : saved;
    return error != 0 ? -1 : syscall(SYS_pwrite64, fd, data, size, at);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return pwrite64(fd, data, size, at); }
