package peer

import "time"

const (
	// buckets is the number of sums in a SyncRequest.
	buckets = 1024

	// maxMessage bounds a message in bytes; maxFile a descriptor file, so that
	// one fits. A port says of larger ones only that it cannot be linked.
	maxMessage = 4 << 20
	maxFile    = 3 << 20
	// maxRecord bounds a record; of an owner beyond it methods are left out.
	maxRecord = 1 << 20
	// chunk is how much a message holds if there is more.
	chunk = 256 << 10
	// maxFetch is how many owners, and maxWant how many files, one request
	// names.
	maxFetch = 256
	maxWant  = 1024

	// fetchBound is how long an agent may take to answer a Fetch before it is
	// passed over; it holds its answer for fetchHold at most.
	fetchBound = time.Second
	fetchHold  = fetchBound / 2
	// syncBound is how long the next message may take before all that differs
	// has come.
	syncBound = 10 * time.Second
	// syncAge is about how long a stream lives: what a gap in it has lost comes
	// with the sums of the next.
	syncAge = 10 * time.Minute
	// pushDelay is how long records gather before they are passed on.
	pushDelay = 200 * time.Millisecond

	// The first Sync is waited for before anything is collected that others may
	// know already.
	firstSync = 3 * time.Second
	// Nor is anything collected while agents come and go, since each sees others
	// at a time of its own and would place owners otherwise: the nodes have to have
	// been the same for quietTime. That is waited for at most quietMost.
	quietTime = 2 * time.Second
	quietMost = 10 * time.Second

	// An owner of which nothing is known is collected once its hosts have been the
	// same for hostQuiet, or it has been there for hostMost.
	hostQuiet = time.Second
	hostMost  = 5 * time.Second

	// Streams are opened at linkRate a second, and linkBurst at once.
	linkRate, linkBurst = 2, 4

	// Who has pods of an owner looks after it when nothing came for hostGrace,
	// one after the other, hostStep apart; all others after farGrace, spread over
	// farSpread for each member.
	hostGrace = 2 * time.Second
	hostStep  = time.Second
	farGrace  = 5 * time.Second
	farSpread = 10 * time.Millisecond
	// askAgain is when an agent is asked again that was at it.
	askAgain = 3 * time.Second
	// wantDelay is how long wishes gather before a Fetch.
	wantDelay = 10 * time.Millisecond

	// Fetches made in a minute: for callers of this node, and for nobody.
	wantedRate, wantedBurst = 30, 30
	overdueRate             = 10
	overdueBurst            = 10

	// A peer that failed is left alone for backoffLeast, then twice as long, up
	// to backoffMost; one that misbehaved for misbehaved at least.
	backoffLeast = time.Second
	backoffMost  = 2 * time.Minute
	misbehaved   = time.Minute

	// What others may ask of this agent: requests in a second, all together and
	// each, and open streams.
	serveRate, serveBurst         = 100, 400
	servePeerRate, servePeerBurst = 5, 20
	maxStreams, maxPeerStreams    = 256, 3

	// maxLog is how far behind a stream may fall.
	maxLog = 8192
	// Records that may count soon are kept for maxWaiting, as many as that.
	waitingTime = time.Minute
	maxWaiting  = 4096
	// filesTime is how long a record waits for its files.
	filesTime = 5 * time.Second
	// maxAhead is how far another node's clock may be ahead.
	maxAhead = 5 * time.Minute

	// tick is how often it is looked what is due.
	tick = 500 * time.Millisecond
)
