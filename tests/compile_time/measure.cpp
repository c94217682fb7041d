/// Runs a command and prints on standard error what it took, its own processes' children included:
/// "<seconds of the processors> <seconds on the clock> <MiB at most>". Ends as the command does.
#include <chrono>
#include <cstdio>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  auto const begin = std::chrono::steady_clock::now();
  pid_t const child = fork();
  if (child == 0) {
    execvp(argv[1], argv + 1);
    std::perror(argv[1]);
    _exit(127);
  }
  int status = 0;
  rusage used{};
  if (child < 0 || wait4(child, &status, 0, &used) < 0) {
    std::perror("measure");
    return 2;
  }
  auto const seconds = [](timeval const& t) { return double(t.tv_sec) + 1e-6 * double(t.tv_usec); };
  double const wall = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::fprintf(stderr, "%.2f %.2f %ld\n", seconds(used.ru_utime) + seconds(used.ru_stime), wall,
               used.ru_maxrss / 1024);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
