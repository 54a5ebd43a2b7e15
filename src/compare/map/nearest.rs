/*! The names that are nearest to one that nobody knows: a slip of the pen is answered with what was meant. */

/// The names that are nearest to one, nearest first, at most five.
pub fn nearest(name: &str, all: &[&str]) -> Vec<String> {
    let wanted: Vec<char> = name.to_lowercase().chars().take(200).collect();
    let mut by: Vec<(usize, &str)> = all
        .iter()
        .map(|n| {
            let is: Vec<char> = n.to_lowercase().chars().take(200).collect();
            let contained = !name.is_empty() && n.to_lowercase().contains(&name.to_lowercase());
            (if contained { 0 } else { distance(&wanted, &is) }, *n)
        })
        .collect();
    by.sort();
    by.into_iter().take(5).map(|(_, n)| n.escape_debug().to_string()).collect()
}

/// Levenshtein's distance.
fn distance(a: &[char], b: &[char]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut before = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let here = (before + usize::from(x != y)).min(row[j] + 1).min(row[j + 1] + 1);
            before = std::mem::replace(&mut row[j + 1], here);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        let d = |a: &str, b: &str| distance(&a.chars().collect::<Vec<_>>(), &b.chars().collect::<Vec<_>>());
        assert_eq!((d("kitten", "sitting"), d("", "abc"), d("abc", "abc")), (3, 3, 0));
        assert_eq!(nearest("q_pe", &["x", "k_pe", "mla.q_pe"])[..2], ["mla.q_pe", "k_pe"]);
    }
}
