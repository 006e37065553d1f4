//! What a plugin's answers mean.

use super::lane::{Direction, judge};
use crate::nccl::abi::ResultCode;

#[test]
fn only_the_first_result_2_of_a_receive_without_done_may_be_no_failure() {
    use Direction::{Recv, Send};
    for direction in [Send, Recv] {
        assert_eq!(judge(direction, ResultCode::SUCCESS, true), Ok(true));
        assert_eq!(judge(direction, ResultCode::SUCCESS, false), Ok(false));
        for code in (1..9).map(ResultCode) {
            for done in [false, true] {
                let transient = direction == Recv && code == ResultCode::SYSTEM_ERROR && !done;
                assert_eq!(judge(direction, code, done), Err(transient), "{direction:?} {code} {done}");
            }
        }
    }
}
