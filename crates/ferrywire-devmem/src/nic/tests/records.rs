//! Where records of claims are searched, and what a claim does once its record is deleted.

use super::*;
use cleanup::clean_up_all;
use directories::Directory;
use std::os::unix::fs::{DirBuilderExt, symlink};

/// Regression: only one directory was searched, so a user's clean-up missed root's records and reported success.
#[test]
fn a_clean_up_searches_every_directory_and_fails_if_one_cannot_be_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let [closed, open] = ["closed", "open"].map(|name| folder.path().join(name));
    // A file in place of the folder: root can enter every folder.
    std::fs::write(&closed, "").expect("a file");
    let of_nic = open.join(format!("{}-gone0", journal::namespace().expect("a namespace")));
    std::fs::create_dir_all(&of_nic).expect("a folder");
    std::fs::write(of_nic.join("settings"), "whatever").expect("a file");
    let ours = |path: &std::path::Path| Directory { path: path.to_owned(), is_ours: true };
    let CleanUp { reported, failed } = clean_up_all(&[ours(&closed), ours(&open)]);
    assert!(failed, "{reported:?}");
    assert!(reported[0].contains(&format!("earlier runs in {}", closed.display())), "{reported:?}");
    assert!(reported[1].contains("gone0 is gone"), "{reported:?}");
    let refused = cleanup::not_read(&closed, &std::io::Error::from_raw_os_error(libc::EACCES));
    assert!(refused.ends_with(": run as root"), "{refused}");
}

#[test]
fn root_searches_the_directories_of_all_users() {
    let users = tempfile::tempdir().expect("a folder");
    for user in ["1000", "7"] {
        std::fs::create_dir(users.path().join(user)).expect("a folder");
    }
    let shared = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(shared.path().join("ferrywire-7")).expect("a folder");
    let found = |environment: Option<&str>, user| {
        let environment = environment.map(|runtime| users.path().join(runtime));
        let all = directories::candidates(environment, users.path(), shared.path(), user);
        let name = |Directory { path, is_ours }: &Directory| {
            let path = path.strip_prefix(users.path()).unwrap_or(path);
            let path = path.strip_prefix(shared.path()).unwrap_or(path);
            let name = path.display().to_string().replace("/ferrywire/devmem", "").replace("/devmem", "");
            if *is_ours { name } else { format!("{name}, only read") }
        };
        all.iter().map(name).collect::<Vec<_>>()
    };
    let of_users = ["1000, only read", "7, only read", "ferrywire-7, only read"];
    assert_eq!(found(None, 0), [&["/run"], &of_users[..]].concat());
    let first = ["/run", "7, only read", "1000, only read", "ferrywire-7, only read"];
    assert_eq!(found(Some("7"), 0), first, "each once");
    assert_eq!(found(Some("other"), 7), ["/run", "other", "7"], "a user's own, and root's");
}

/// Regression: root followed links in the directories of other users, and wrote where they led.
#[test]
fn what_lies_in_the_directory_of_another_user_is_never_changed_by_root() {
    let (users, target) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    std::fs::create_dir_all(users.path().join("1000/ferrywire")).expect("a folder");
    symlink(target.path(), users.path().join("1000/ferrywire/devmem")).expect("a link");
    let record = target.path().join(format!("{}-lo", journal::namespace().expect("a namespace")));
    std::fs::create_dir(&record).expect("a folder");
    std::fs::write(record.join("settings"), "whatever").expect("a file");
    let shared = tempfile::tempdir().expect("a folder");
    let all = directories::candidates(None, users.path(), shared.path(), 0);
    let CleanUp { reported, failed } = clean_up_all(&all[1..]);
    assert!(failed && reported[0].contains("NIC lo: an earlier run has left changes"), "{reported:?}");
    let files = std::fs::read_dir(&record).expect("a folder").map(|file| file.expect("a file").file_name());
    assert_eq!(files.collect::<Vec<_>>(), ["settings"]);
}

/// Regression: a folder that another user had made in /tmp was used for records of settings.
#[test]
fn a_folder_in_tmp_that_others_can_change_is_not_used() {
    let shared = tempfile::tempdir().expect("a folder");
    let private = |name: &str| shared.path().join(name).join("devmem");
    std::fs::DirBuilder::new().mode(0o777).create(shared.path().join("open")).expect("a folder");
    std::fs::set_permissions(shared.path().join("open"), std::os::unix::fs::PermissionsExt::from_mode(0o777))
        .expect("a mode");
    symlink(shared.path(), shared.path().join("link")).expect("a link");
    for name in ["open", "link"] {
        let error = directories::make_private(&private(name)).unwrap_err();
        assert!(error.to_string().contains("only this user can enter"), "{name}: {error}");
    }
    for _ in 0..2 {
        directories::make_private(&private("own")).expect("it is made once, and found again");
    }
    let user = rustix::process::geteuid().as_raw();
    let name = format!("ferrywire-{user}");
    let listed = || {
        let all = directories::candidates(None, &shared.path().join("none"), shared.path(), user);
        let found = all.iter().find(|each| each.path == private(&name)).map(|each| each.is_ours);
        found == Some(true)
    };
    std::fs::rename(shared.path().join("own"), shared.path().join(&name)).expect("renamed");
    assert!(listed());
    for spoilt in ["open", "link"] {
        std::fs::rename(shared.path().join(&name), shared.path().join("aside")).expect("renamed");
        std::fs::rename(shared.path().join(spoilt), shared.path().join(&name)).expect("renamed");
        assert!(!listed(), "{spoilt}");
        std::fs::rename(shared.path().join(&name), shared.path().join(spoilt)).expect("renamed");
        std::fs::rename(shared.path().join("aside"), shared.path().join(&name)).expect("renamed");
    }
}

#[test]
fn changes_recorded_by_another_user_are_reported_and_left() {
    const USER: Option<u32> = Some(1234);
    let nic = Nic::new(untouched());
    let report = || {
        let mut done = CleanUp::default();
        cleanup::report_left(nic.directory(), USER, &mut done).expect("it can be read");
        done
    };
    let claim = nic.claim(&wish(1, true)).expect("allowed");
    assert_eq!(report(), CleanUp::default(), "the claim is live");
    nic.kill(claim);
    let (files, state) = (nic.files(), nic.state());
    let CleanUp { reported, failed } = report();
    assert!(failed && reported[0].contains("a run of user 1234 has left changes"), "{reported:?}");
    assert_eq!((nic.files(), nic.state()), (files, state), "nothing is changed");
    nic.clean();
    assert_eq!(report(), CleanUp::default(), "a lock says nothing");
}

/// Regression: at logout the login manager deleted the journal of a live run; no connection could be steered any more,
/// and the NIC stayed changed.
#[test]
fn a_journal_that_is_deleted_while_its_claim_lives_is_made_again() {
    for for_good in [false, true] {
        let (nic, elsewhere) = (Nic::new(untouched()), tempfile::tempdir().expect("a folder"));
        let mut claim = nic.claim(&wish(1, true)).expect("allowed");
        claim.journal.replacement = elsewhere.path().join("private/devmem");
        claim.steer(end(PAIR[0]), end(PAIR[1])).expect("room");
        nic.delete_journal(for_good);
        claim.bind(fake::some_file().as_fd()).expect("header split is on");
        let rule = claim.steer(end(PAIR[0]), end("10.0.0.2:40001")).expect("the journal is made again");
        claim.unsteer(rule);
        drop(claim);
        assert_eq!(nic.state(), untouched(), "for good: {for_good}");
        assert_eq!(elsewhere.path().join("private/devmem").exists(), for_good);
    }
}

#[test]
fn settings_are_restored_after_the_last_claim_although_the_journal_was_deleted() {
    for first_ends_first in [true, false] {
        let nic = Nic::new(untouched());
        let mut first = nic.claim(&wish(1, true)).expect("allowed");
        let mut second = nic.claim(&wish(1, true)).expect("allowed");
        first.bind(fake::some_file().as_fd()).expect("it is set up");
        second.bind(fake::some_file().as_fd()).expect("it is set up");
        first.steer(end(PAIR[0]), end(PAIR[1])).expect("room");
        nic.delete_journal(false);
        second.steer(end(PAIR[0]), end("10.0.0.2:40001")).expect("the journal is made again");
        // The NIC looks as if an administrator had set it up.
        let third = nic.claim(&wish(1, true)).expect("allowed");
        first.steer(end(PAIR[0]), end("10.0.0.2:40002")).expect("the claim is recorded again");
        let (one, other) = if first_ends_first { (first, second) } else { (second, first) };
        drop((one, third));
        assert_eq!((nic.state().split, nic.state().ntuple.on), (Split::On, true), "a claim lives");
        assert!(!nic.state().spread.contains(&other.queues()[0]), "{:?}", nic.state().spread);
        drop(other);
        assert_eq!((nic.state(), nic.files()), (untouched(), vec!["lock".to_owned()]));
    }
}
