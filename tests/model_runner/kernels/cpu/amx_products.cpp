// Tile products of random numbers, printed bit by bit: of the instructions, or of what stands for them (`amx.h`).

#include <cstdio>
#include <random>
#include <vector>

#include "amx.h"

#ifdef HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

using namespace engine;

// Sums of `rows` x `columns` over `pairs` pairs of inputs, twice, from what `c` was.
static void multiply(int rows, int columns, int pairs, const bf16* a, const bf16* b, float* c) {
    amx::Shapes shapes;
    shapes.set(0, rows, columns * 4);
    shapes.set(5, rows, pairs * 4);
    shapes.set(7, pairs, columns * 4);
    amx::Tiles tiles(shapes);
    amx::load<0>(c, 17 * sizeof(float));
    amx::load<5>(a, 70);  // 35 numbers of bfloat16 a row
    amx::load<7>(b, 64);
    amx::dot_pairs<0, 5, 7>();
    amx::dot_pairs<0, 5, 7>();
    amx::store<0>(c, 17 * sizeof(float));
}

int main() {
#ifdef HAS_AMX
    if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) return 1;
#endif
    std::mt19937 random(0);
    auto number = [&] { return std::ldexp(float(int32_t(random())), int(random() % 24) - 12); };
    for (int round = 0; round < 400; ++round) {
        int rows = 1 + random() % 16, columns = 1 + random() % 16, pairs = 1 + random() % 16;
        std::vector<bf16> a(16 * 35), b(16 * 32);
        std::vector<float> c(16 * 17);
        for (bf16& x : a) from_float(number(), &x);
        for (bf16& x : b) from_float(number(), &x);
        for (float& x : c) x = number() * 0x1p20f;
        if (round % 10 == 0) a[35 * (rows - 1)].bits = round % 20 ? 0x7f80 : 0x7fc0;  // infinity, NaN
        multiply(rows, columns, pairs, a.data(), b.data(), c.data());
        for (float x : c) {
            uint32_t bits;
            std::memcpy(&bits, &x, sizeof bits);
            std::printf("%08x\n", x == x ? bits : 0x7fc00000u);  // which NaN it is, nobody promises
        }
    }
}
