# Toolchain for x86_64 Linux. Programs are linked statically, so that qemu-user runs them without a sysroot. QEMU's CPU model "max"
# supports AVX2.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR x86_64)
set(CMAKE_C_COMPILER x86_64-linux-gnu-gcc)
set(CMAKE_EXE_LINKER_FLAGS_INIT -static)
set(CMAKE_CROSSCOMPILING_EMULATOR "qemu-x86_64;-cpu;max")
