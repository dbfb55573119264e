// Linked into every library: what newer GNU headers expect of the system and manylinux_2_28 does not have.
//
// GCC compiles against the libstdc++ and glibc of the machine that builds. A user's machine may be as old as glibc 2.28
// and libstdc++ 3.4.24. Linking those libraries statically is no way out (it drags in newer glibc symbols still), so
// the few missing definitions come along here, hidden by exports.map. Whole classes, because which of their members a
// library calls differs from one GCC to the next.
#include <cxxabi.h>

#include <exception>
#include <iostream>
#include <new>
#include <sstream>
#include <string>

// Default constructors of string streams (GLIBCXX_3.4.26) and their C++20 str() (GLIBCXX_3.4.29).
template class std::basic_stringbuf<char>;
template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;

// What containers call when they are asked for more than there is address space (GLIBCXX_3.4.29).
void std::__throw_bad_array_new_length() { throw std::bad_array_new_length(); }

extern "C" {

// Lets libstdc++ skip atomic reference counts while a program has one thread (GLIBC_2.32). Zero: never skip them.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

#if __GNUC__ >= 13
// <iostream> asks for this to be linked (GLIBCXX_3.4.32) where it used to initialize std::cout, as kStreams does now.
__attribute__((visibility("hidden"))) void ios_base_library_init() __asm__("_ZSt21ios_base_library_initv");
void ios_base_library_init() {}

// What an exception that leaves a noexcept function calls (CXXABI_1.3.15).
void __cxa_call_terminate(void* exception) noexcept {
  abi::__cxa_begin_catch(exception);
  std::terminate();
}
#endif

}  // extern "C"

#if __GNUC__ >= 13
static std::ios_base::Init kStreams;

// The rare half of std::string::replace (GLIBCXX_3.4.31).
template void std::string::_M_replace_cold(char*, std::string::size_type, const char*, const std::string::size_type,
                                           const std::string::size_type);
#endif
