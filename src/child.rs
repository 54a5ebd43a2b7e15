/*!
A process with a time limit: what may take a GPU away from its process, or never end, runs in one of its own.

A kernel that reads where nothing is ends its process's use of the GPU, and one that hangs can't be ended but with its
process. So whoever wants to go on afterwards waits here, for a process that it can end.
*/

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often a process is looked at.
const LOOK: Duration = Duration::from_millis(10);
/// What a killed process is waited for: the driver may keep it for a while.
const GRACE: Duration = Duration::from_secs(20);

/// What became of a process.
#[derive(Debug)]
pub struct Ended {
    /// Its status; none: it was ended here, after the limit.
    pub status: Option<ExitStatus>,
    /// What it wrote to stdout.
    pub stdout: Vec<u8>,
    /// What it wrote to stderr.
    pub stderr: Vec<u8>,
}

impl Ended {
    /// Its exit code, if it ended by itself and by no signal.
    pub fn code(&self) -> Option<i32> {
        self.status.and_then(|s| s.code())
    }

    /// How it ended, in words: `ended with code 3`, `ended by signal 11`, …
    pub fn how(&self) -> String {
        let Some(status) = self.status else { return "was ended".into() };
        if let Some(code) = status.code() {
            return format!("ended with code {code}");
        }
        #[cfg(unix)]
        if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
            return format!("ended by signal {signal}");
        }
        "ended without a code".into()
    }

    /// All that it wrote, stdout first, without spaces at the end.
    pub fn text(&self) -> String {
        let text = [&self.stdout[..], &self.stderr[..]].map(String::from_utf8_lossy).concat();
        text.trim_end().to_string()
    }
}

/// Runs a process to its end, or to the limit: then it is killed. It reads nothing from stdin.
///
/// # Errors
/// It could not be started or waited for.
pub fn run(command: &mut Command, limit: Duration) -> std::io::Result<Ended> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let (stdout, stderr) = (drained(child.stdout.take()), drained(child.stderr.take()));
    let mut status = wait(&mut child, limit)?;
    let in_time = status.is_some();
    if !in_time {
        // Where that fails it has ended in between.
        let _ = child.kill();
        status = wait(&mut child, GRACE)?;
    }
    // A process that even a kill does not end keeps its pipes: what it wrote is not waited for.
    let read = |thread: JoinHandle<Vec<u8>>| {
        if status.is_some() { thread.join().unwrap_or_default() } else { Vec::new() }
    };
    let (stdout, stderr) = (read(stdout), read(stderr));
    Ok(Ended { status: status.filter(|_| in_time), stdout, stderr })
}

/// Reads a pipe to its end, beside everything else: a full pipe stops who writes to it.
fn drained(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // What was read before an error is kept.
            let _ = pipe.read_to_end(&mut bytes);
        }
        bytes
    })
}

fn wait(child: &mut Child, limit: Duration) -> std::io::Result<Option<ExitStatus>> {
    let started = Instant::now();
    loop {
        let status = child.try_wait()?;
        if status.is_some() || started.elapsed() >= limit {
            return Ok(status);
        }
        std::thread::sleep(LOOK);
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> Ended {
        run(Command::new("sh").args(["-c", script]), limit).unwrap()
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn what_it_wrote_and_how_it_ended() {
        let e = shell("echo out; echo err >&2; exit 3", LONG);
        assert_eq!((e.code(), e.how().as_str()), (Some(3), "ended with code 3"));
        assert_eq!(
            (&e.stdout[..], &e.stderr[..], e.text().as_str()),
            (&b"out\n"[..], &b"err\n"[..], "out\nerr")
        );
        let e = shell("kill -11 $$", LONG);
        assert_eq!((e.code(), e.how().as_str()), (None, "ended by signal 11"));
    }

    /// More than a pipe holds, on both.
    #[test]
    fn a_full_pipe_stops_nobody() {
        let e = shell("head -c 300000 /dev/zero; head -c 300000 /dev/zero >&2", LONG);
        assert_eq!((e.code(), e.stdout.len(), e.stderr.len()), (Some(0), 300_000, 300_000));
    }

    #[test]
    fn what_does_not_end_is_ended() {
        let started = Instant::now();
        let e = shell("echo begun; exec sleep 600", Duration::from_millis(300));
        assert!(started.elapsed() < GRACE, "{:?}", started.elapsed());
        assert_eq!((e.status, e.how().as_str(), e.text().as_str()), (None, "was ended", "begun"));
    }
}
