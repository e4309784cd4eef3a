//! Waiting for a condition: no test sleeps for a fixed time.

use std::{
    fmt::Debug,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};

/// How often [`eventually`] looks.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// What a look at the world says: settled with a value, or not yet and why.
///
/// `bool` settles when true, `Option` when `Some`, `Result` when `Ok`; the error of a `Result` is what was seen
/// instead.
pub trait Look {
    /// What [`eventually`] returns.
    type Value;

    /// The value, or what was seen instead.
    ///
    /// # Errors
    /// Not settled yet; the error describes what was seen.
    fn settled(self) -> Result<Self::Value, String>;
}

impl Look for bool {
    type Value = ();

    fn settled(self) -> Result<(), String> {
        if self { Ok(()) } else { Err("false".to_owned()) }
    }
}

impl<T> Look for Option<T> {
    type Value = T;

    fn settled(self) -> Result<T, String> {
        self.ok_or_else(|| "nothing".to_owned())
    }
}

impl<T, E: Debug> Look for Result<T, E> {
    type Value = T;

    fn settled(self) -> Result<T, String> {
        self.map_err(|seen| format!("{seen:?}"))
    }
}

/// Looks every 10 ms until `look` settles. `awaited` completes the sentence "waited for ...".
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// use std::time::Duration;
/// let mut looks = 0;
/// let seen = lab::eventually(Duration::from_secs(5), "the third look", async || {
///     looks += 1;
///     if looks == 3 { Ok(looks) } else { Err(format!("look {looks}")) }
/// });
/// assert_eq!(seen.await.unwrap(), 3);
/// # });
/// ```
///
/// # Errors
/// `timeout` has passed; the message holds the sentence and what was seen last. A look that takes longer than what is
/// left of the timeout is given up.
pub async fn eventually<L, F>(timeout: Duration, awaited: &str, mut look: F) -> Result<L::Value>
where
    L: Look,
    F: AsyncFnMut() -> L,
{
    let start = Instant::now();
    let mut last_seen = "a look that did not end".to_owned();
    loop {
        let left = timeout.saturating_sub(start.elapsed());
        match tokio::time::timeout(left.max(POLL_INTERVAL), look()).await {
            Ok(seen) => match seen.settled() {
                Ok(value) => return Ok(value),
                Err(seen) => last_seen = seen,
            },
            Err(_) => bail!("waited {timeout:?} for {awaited}; last seen: {last_seen}, then a look that did not end"),
        }
        if start.elapsed() >= timeout {
            bail!("waited {timeout:?} for {awaited}; last seen: {last_seen}");
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_failed_wait_tells_the_sentence_and_what_was_seen_last() {
        let error = eventually(Duration::from_millis(30), "the moon to be full", async || Err::<(), _>("half a moon"));
        let message = error.await.unwrap_err().to_string();
        assert!(message.contains("the moon to be full") && message.contains("half a moon"), "{message}");
    }

    #[tokio::test]
    async fn a_look_that_never_ends_is_given_up() {
        let message = eventually(Duration::from_millis(30), "an answer", async || std::future::pending::<bool>().await)
            .await
            .unwrap_err()
            .to_string();
        assert!(message.contains("an answer") && message.contains("did not end"), "{message}");
    }
}
