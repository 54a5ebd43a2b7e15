/*!
What happens when bytes of a mapped file are gone: the program ends in words, not by a signal.

A file that is cut short while it is mapped (a download that starts anew, a copy over it) leaves pages without
anything behind them, and reading one is a bus error. Asking for the length before each read only narrows the race,
and reading with `pread` would copy every weight that is multiplied straight from the map; so the signal itself is
caught. There is no going on: whatever is put in the place of the lost bytes, something would be computed from it. The
handler writes what, where and what to do to stderr and ends the process with the exit code of unreadable input.

The library leaves signals alone; a program asks for this once, with [`end_on_lost_pages`]. A bus error anywhere else
than in a map of ours is handed on to whoever handled it before (on some systems Rust's own check for an overflown
stack).
*/

#[cfg(unix)]
pub(super) use unix::Watched;
#[cfg(unix)]
pub use unix::end_on_lost_pages;

/// Elsewhere a mapped file cannot be cut short.
#[cfg(not(unix))]
pub fn end_on_lost_pages(_exit: u8) {}

/// Elsewhere there is nothing to watch.
#[cfg(not(unix))]
pub(super) struct Watched;

#[cfg(not(unix))]
impl Watched {
    pub fn new(_: &[u8], _: &std::path::Path) -> Watched {
        Watched
    }
}

#[cfg(unix)]
mod unix {
    use std::ffi::{c_int, c_void};
    use std::os::unix::ffi::OsStrExt;
    use std::path::Path;
    use std::sync::OnceLock;
    use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
    use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicUsize};

    /// A place of the list of maps. Places are never freed, only taken again: the handler may walk the list at any time.
    struct Place {
        taken: AtomicBool,
        start: AtomicUsize,
        end: AtomicUsize,
        path: AtomicPtr<u8>,
        length: AtomicUsize,
        next: AtomicPtr<Place>,
    }

    static FIRST: AtomicPtr<Place> = AtomicPtr::new(std::ptr::null_mut());
    static EXIT: AtomicI32 = AtomicI32::new(2);
    static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

    fn places() -> impl Iterator<Item = &'static Place> {
        let mut at = FIRST.load(Acquire);
        std::iter::from_fn(move || {
            // SAFETY: null, or a place that was leaked when it was put into the list.
            let place: &'static Place = unsafe { at.as_ref() }?;
            at = place.next.load(Acquire);
            Some(place)
        })
    }

    fn place() -> &'static Place {
        let free = |p: &&Place| p.taken.compare_exchange(false, true, AcqRel, Relaxed).is_ok();
        if let Some(place) = places().find(free) {
            return place;
        }
        let place = Box::leak(Box::new(Place {
            taken: AtomicBool::new(true),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            path: AtomicPtr::new(std::ptr::null_mut()),
            length: AtomicUsize::new(0),
            next: AtomicPtr::new(std::ptr::null_mut()),
        }));
        let mut first = FIRST.load(Acquire);
        loop {
            place.next.store(first, Release);
            match FIRST.compare_exchange(first, place, AcqRel, Acquire) {
                Ok(_) => return place,
                Err(now) => first = now,
            }
        }
    }

    /// A map that the handler knows of, as long as this lives; it must not outlive the map.
    pub struct Watched {
        place: &'static Place,
        /// What the place points to.
        _path: Box<[u8]>,
    }

    impl Watched {
        pub fn new(map: &[u8], path: &Path) -> Watched {
            let place = place();
            let path: Box<[u8]> = path.as_os_str().as_bytes().into();
            place.path.store(path.as_ptr().cast_mut(), Relaxed);
            place.length.store(path.len(), Relaxed);
            place.start.store(map.as_ptr() as usize, Relaxed);
            place.end.store(map.as_ptr() as usize + map.len(), Release);
            Watched { place, _path: path }
        }
    }

    impl Drop for Watched {
        fn drop(&mut self) {
            self.place.end.store(0, Release);
            self.place.start.store(0, Release);
            self.place.taken.store(false, Release);
        }
    }

    /// From now on the process ends with this exit code, and an error on stderr, when bytes of a model's or a dump's file
    /// are gone that were there when it was opened.
    pub fn end_on_lost_pages(exit: u8) {
        EXIT.store(exit.into(), Relaxed);
        if BEFORE.get().is_some() {
            return;
        }
        // SAFETY: all zero is a valid sigaction (no flags, an empty mask, the default action).
        let (mut action, mut before): (libc::sigaction, libc::sigaction) = unsafe { std::mem::zeroed() };
        action.sa_sigaction =
            on_bus_error as extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) as usize;
        // On the thread's alternate stack, where it has one.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: both point to a sigaction; the handler keeps to what signal handlers may call.
        if unsafe { libc::sigaction(libc::SIGBUS, &action, &mut before) } == 0 {
            let _ = BEFORE.set(before);
        }
    }

    /// Only loads of atomics, `write`, `_exit` and `sigaction`: all may be called in a signal handler.
    extern "C" fn on_bus_error(signal: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
        // SAFETY: with SA_SIGINFO the kernel passes a siginfo, of a bus error with the address.
        let address = unsafe { (*info).si_addr() } as usize;
        for place in places() {
            let start = place.start.load(Acquire);
            if (start..place.end.load(Acquire)).contains(&address) {
                say(b"error: the file became shorter while it was read, or its disk failed\n  where: ");
                // SAFETY: an address within a map is being read, so the map is alive and so is its path.
                say(unsafe {
                    std::slice::from_raw_parts(place.path.load(Acquire), place.length.load(Acquire))
                });
                say(b", byte ");
                let mut digits = [0; 20];
                say(decimal(address - start, &mut digits));
                say(b"\n  do: do not write to a model while it is read: run again when the file is complete\n");
                // SAFETY: ends the process at once, nothing of it is run any more.
                unsafe { libc::_exit(EXIT.load(Relaxed)) };
            }
        }
        // Not ours: the access is repeated under whoever came before.
        // SAFETY: a sigaction that the kernel gave, or all zero, the default action.
        unsafe {
            let default = std::mem::zeroed();
            libc::sigaction(signal, BEFORE.get().unwrap_or(&default), std::ptr::null_mut());
        }
    }

    fn say(text: &[u8]) {
        // SAFETY: the bytes are readable; where stderr is closed there is nobody to tell.
        unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
    }

    /// The digits of a number, without allocating.
    fn decimal(mut n: usize, to: &mut [u8; 20]) -> &[u8] {
        let mut at = to.len();
        loop {
            at -= 1;
            to[at] = b'0' + (n % 10) as u8;
            n /= 10;
            if n == 0 {
                return &to[at..];
            }
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn decimals() {
            for n in [0, 7, 10, 1234567890, usize::MAX] {
                assert_eq!(decimal(n, &mut [0; 20]), n.to_string().as_bytes());
            }
        }

        #[test]
        fn places_are_taken_again() {
            let path = Path::new("x");
            let many: Vec<Watched> = (0..10).map(|_| Watched::new(&[1, 2], path)).collect();
            drop(many);
            let before = places().count();
            drop((0..10).map(|_| Watched::new(&[1, 2], path)).collect::<Vec<_>>());
            // Other tests may add places meanwhile, ten of ours need none.
            assert!(places().count() < before + 10);
        }
    }
}
