// Large payloads through non-blocking sockets, waited for here: the thread that calls needs no interpreter meanwhile.
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <time.h>

#include <algorithm>

#include "kernels.h"

namespace {

constexpr int64_t SECOND_NS = 1000000000;
constexpr int64_t RECEIVE_BYTES = 1 << 20;  // of one call; and a thread isn't woken for less, where more is to come

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * SECOND_NS + now.tv_nsec;
}

// 0: one of the events has come, or the connection has ended. ETIMEDOUT: neither, in time. Others: errors.
int wait_for(int fd, short events, int64_t timeout_ns) {
  const int64_t until_ns = now_ns() + timeout_ns;
  for (;;) {
    const int64_t left_ns = std::max<int64_t>(until_ns - now_ns(), 0);
    const timespec timeout = {(time_t)(left_ns / SECOND_NS), (long)(left_ns % SECOND_NS)};
    pollfd watched = {fd, events, 0};
    const int ready = ppoll(&watched, 1, &timeout, nullptr);
    if (ready > 0) return 0;
    if (ready == 0) return ETIMEDOUT;
    if (errno != EINTR) return errno;
  }
}

// Wait for these bytes' turn; an end of the connection ends it early.
int pause(int fd, Pace* pace, int64_t size) {
  const int64_t wait_ns = meshift_reserve(pace, size);
  const int failure = wait_ns > 0 ? wait_for(fd, 0, wait_ns) : 0;
  return failure == ETIMEDOUT ? 0 : failure;
}

int send_all(int fd, const char* data, int64_t size, int64_t stall_ns) {
  while (size > 0) {
    const ssize_t sent = send(fd, data, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      data += sent;
      size -= sent;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (const int failure = wait_for(fd, POLLOUT, stall_ns)) return failure;
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

int wake_at(int fd, int64_t size) {
  const int bytes = (int)size;
  return setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes) ? errno : 0;
}

// The sum of what lies between `counted` and `end`, as far as the processor is quick at it.
void count(const char* data, int64_t end, int64_t* counted, uint32_t* crc) {
  *counted += meshift_crc32(data + *counted, (end - *counted) / 64 * 64, crc);
}

}  // namespace

extern "C" int64_t meshift_reserve(Pace* pace, int64_t size) {
  const int64_t now = now_ns(), cost_ns = (int64_t)((double)size * pace->ns_per_byte);
  int64_t before = __atomic_load_n(&pace->free_at_ns, __ATOMIC_RELAXED), after;
  do {
    after = std::max(before, now - pace->burst_ns) + cost_ns;
  } while (!__atomic_compare_exchange_n(&pace->free_at_ns, &before, after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return std::max<int64_t>(after - now, 0);
}

extern "C" int64_t meshift_send(int64_t fd, const char* data, int64_t size, Pace* pace, int64_t chunk, int64_t stall_ns) {
  while (size > 0) {
    const int64_t piece = std::min(size, chunk);
    if (pace != nullptr)
      if (const int failure = pause((int)fd, pace, piece)) return failure;
    if (const int failure = send_all((int)fd, data, piece, stall_ns)) return failure;
    data += piece;
    size -= piece;
  }
  return 0;
}

extern "C" int64_t meshift_receive(int64_t fd, char* data, int64_t size, int64_t stall_ns, int64_t* counted,
                                   uint32_t* crc) {
  int64_t taken = 0, wakes_at = 1;
  int failure = 0;
  *counted = 0;
  while (taken < size && !failure) {
    const ssize_t got = recv((int)fd, data + taken, std::min(size - taken, RECEIVE_BYTES), MSG_DONTWAIT);
    if (got > 0) {
      taken += got;
      count(data, taken, counted, crc);
    } else if (got == 0) {
      failure = -1;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      const int64_t wanted = std::min(size - taken, RECEIVE_BYTES);
      if (wanted != wakes_at) failure = wake_at((int)fd, wakes_at = wanted);
      if (!failure) failure = wait_for((int)fd, POLLIN, stall_ns);
    } else if (errno != EINTR) {
      failure = errno;
    }
  }
  if (wakes_at != 1) wake_at((int)fd, 1);
  return failure;
}
