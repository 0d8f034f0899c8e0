// Signals, which are for the threads of the program, not for the threads of this library.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace pycomm {

// While it lives, this thread gets no signal, and a thread that it starts never gets one.
class SignalsBlocked {
   public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

   private:
    sigset_t before_;
};

}  // namespace pycomm
