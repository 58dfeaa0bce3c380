package collect

import (
	"errors"
	"fmt"
)

// ErrStopped indicates that the collector has stopped, so that nothing will be
// collected any more.
var ErrStopped = errors.New("collector has stopped")

// Class says what kind of failure an attempt met.
type Class string

// The classes of failure. All of them are tried again, Deadline and Exhausted
// much later than the others: the server may still be working for a caller
// that left.
const (
	Refused     Class = "refused"     // nobody listens
	Unreachable Class = "unreachable" // the connect failed otherwise
	Silent      Class = "silent"      // no answer within the connect bound
	Unavailable Class = "unavailable" // the connection or the stream broke
	Nonsense    Class = "nonsense"    // answers that do not follow the protocol
	Deadline    Class = "deadline"    // not done within the wall bound
	Exhausted   Class = "exhausted"   // an answer or the sum of them crossed a budget
	Limited     Class = "limited"     // the port had its connections of this hour
)

// Failure is an attempt on one port that gave no result.
type Failure struct {
	Class  Class
	Detail string // one line
}

// Error is the class and the detail.
func (f *Failure) Error() string { return fmt.Sprintf("%s: %s", f.Class, f.Detail) }

// heavy tells whether another attempt could do the server harm.
func (f *Failure) heavy() bool { return f.Class == Deadline || f.Class == Exhausted }
