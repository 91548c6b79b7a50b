// A process of another architecture that calls a kernel library for a test (guest.py). It shares the test's memory: an
// access to an unknown page faults, the page is then read from the test, and what the call has written is sent back.
//
// Messages, in the byte order of both. The test sends a call: name[32], signature[64], 40 numbers of 8 bytes. The guest
// answers with any number of 'R' address (the test sends a byte, 1 if there is such a page, and the page) and 'W'
// address, size, bytes; then 'D' result; or 'X' address: it has accessed memory that the test does not have, and ends.

#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

namespace {

constexpr uint64_t PAGE = 4096;
constexpr int MOST_PAGES = 1 << 16, MOST_WORDS = 40;

struct Page {
    uint64_t address;
    unsigned char* before;  // its content before it was written; null: it was not
} pages[MOST_PAGES];
int num_pages = 0;

void receive(void* to, size_t size) {
    for (ssize_t got; size > 0; to = static_cast<char*>(to) + got, size -= got)
        if ((got = read(0, to, size)) <= 0) _exit(0);
}

void send(const void* from, size_t size) {
    for (ssize_t sent; size > 0; from = static_cast<const char*>(from) + sent, size -= sent)
        if ((sent = write(1, from, size)) <= 0) _exit(0);
}

void send(char kind, uint64_t number) {
    send(&kind, 1);
    send(&number, sizeof number);
}

[[noreturn]] void refuse(uint64_t address) {
    send('X', address);
    _exit(1);
}

void on_fault(int, siginfo_t* info, void*) {
    uint64_t fault = reinterpret_cast<uint64_t>(info->si_addr), address = fault / PAGE * PAGE;
    void* at = reinterpret_cast<void*>(address);
    for (int n = 0; n < num_pages; ++n)
        if (pages[n].address == address) {
            if (pages[n].before != nullptr) refuse(fault);
            pages[n].before = static_cast<unsigned char*>(std::malloc(PAGE));
            std::memcpy(pages[n].before, at, PAGE);
            mprotect(at, PAGE, PROT_READ | PROT_WRITE);
            return;
        }
    char is_there;
    send('R', address);
    receive(&is_there, 1);
    if (!is_there || num_pages == MOST_PAGES) refuse(fault);
    if (mmap(at, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != at) refuse(fault);
    receive(at, PAGE);
    mprotect(at, PAGE, PROT_READ);
    pages[num_pages++] = {address, nullptr};
}

// Sends what the call has written, and forgets all pages.
void give_back() {
    for (int n = 0; n < num_pages; ++n) {
        const unsigned char *now = reinterpret_cast<unsigned char*>(pages[n].address), *before = pages[n].before;
        for (uint64_t first = 0, last; before != nullptr && first < PAGE; first = last + 1) {
            while (first < PAGE && now[first] == before[first]) ++first;
            for (last = first; last < PAGE && now[last] != before[last];) ++last;
            if (first == last) break;
            uint64_t size = last - first;
            send('W', pages[n].address + first);
            send(&size, sizeof size);
            send(now + first, size);
        }
        std::free(pages[n].before);
        munmap(reinterpret_cast<void*>(pages[n].address), PAGE);
    }
    num_pages = 0;
}

// Integers and floats are passed in registers of their own, and further integers on the stack, in their order: the order
// between the two kinds does not matter.
template <size_t... N>
int64_t call(void* function, const int64_t* words, const float* floats, std::index_sequence<N...>) {
    return reinterpret_cast<int64_t (*)(std::remove_cvref_t<decltype(words[N])>..., float, float, float, float)>(function)(
        words[N]..., floats[0], floats[1], floats[2], floats[3]);
}

}  // namespace

int main(int, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (library == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), 1;
    static char stack[1 << 16];
    stack_t other = {stack, 0, sizeof stack};
    sigaltstack(&other, nullptr);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    send('D', 0);
    for (;;) {
        char name[32], signature[64];
        int64_t all[MOST_WORDS], words[MOST_WORDS] = {};
        float floats[4] = {};
        receive(name, sizeof name);
        receive(signature, sizeof signature);
        receive(all, sizeof all);
        int num_words = 0, num_floats = 0;
        for (int n = 0; signature[n]; ++n)
            if (signature[n] == 'f')
                std::memcpy(&floats[num_floats++], &all[n], sizeof(float));
            else
                words[num_words++] = all[n];
        int64_t result = call(dlsym(library, name), words, floats, std::make_index_sequence<MOST_WORDS>{});
        give_back();
        send('D', uint64_t(result));
    }
}
