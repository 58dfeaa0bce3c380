package peer

import (
	"cmp"
	"context"
	"errors"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	peerv1 "github.com/fingerpost/fingerpost/agent/peer/fingerpost/peer/v1"
)

// link is a stream by which another agent tells this one what comes. Its fields
// are guarded by Exchange.mu, but for what says otherwise.
type link struct {
	cancel context.CancelFunc // read-only
	wake   chan struct{}      // capacity 1: there is something to want; read-only
	open   bool               // all that differed has come
	wants  []fileHash         // that are not asked for yet
	asked  map[fileHash]time.Time
}

// want needs Exchange.mu. It asks for files, unless that was done just now: many records have the same.
func (l *link) want(files []fileHash) {
	now := time.Now()
	for _, h := range files {
		if at, ok := l.asked[h]; ok && now.Sub(at) < filesTime {
			continue
		}
		l.asked[h] = now
		l.wants = append(l.wants, h)
	}
	if len(l.wants) > 0 {
		select {
		case l.wake <- struct{}{}:
		default:
		}
	}
}

// takeWants takes as many as one request may have of the files to ask for.
func (x *Exchange) takeWants(l *link) *peerv1.SyncRequest {
	x.mu.Lock()
	defer x.mu.Unlock()
	req := &peerv1.SyncRequest{}
	for _, h := range l.wants[:min(len(l.wants), maxWant)] {
		req.Files = append(req.Files, h[:])
	}
	if l.wants = l.wants[len(req.GetFiles()):]; len(l.wants) == 0 {
		l.wants = nil
	}
	return req
}

// relink opens streams to those who are neighbours now, and closes others. Only
// keepTime calls it.
func (x *Exchange) relink(ctx context.Context, running *sync.WaitGroup) {
	now := time.Now()
	wanted, of := x.neighbours(now)
	if of == nil {
		return
	}
	if x.cost != nil {
		costs := map[string]time.Duration{}
		for _, m := range wanted {
			costs[m.Node] = x.cost(m)
		}
		slices.SortStableFunc(wanted, func(a, b Member) int { return cmp.Compare(costs[a.Node], costs[b.Node]) })
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.roster != of {
		x.relinkAt = time.Time{} // there are others by now
		return
	}
	x.linked, x.relinkAt = x.roster, now.Add(time.Hour)
	for _, c := range x.peers {
		if now.Before(c.until) && c.until.Before(x.relinkAt) {
			x.relinkAt = c.until
		}
	}
	want := map[string]bool{}
	for _, m := range wanted {
		want[m.Node] = true
	}
	if len(want) == 0 && len(x.roster.ring) > 1 {
		x.synced = true // all were tried in vain
	}
	for node, l := range x.links {
		if !want[node] {
			l.cancel()
		}
	}
	for _, to := range wanted {
		node := to.Node
		if x.links[node] != nil {
			continue
		}
		// What the first one has told the others need not tell again.
		if len(x.links) > 0 && !x.synced || !x.linking.Allow() {
			x.relinkAt = now.Add(tick)
			break
		}
		ctx, cancel := context.WithCancel(ctx)
		l := &link{cancel: cancel, wake: make(chan struct{}, 1), asked: map[fileHash]time.Time{}}
		x.links[node] = l
		running.Go(func() {
			defer cancel()
			begun := time.Now()
			err := x.listen(ctx, to, l)
			x.mu.Lock()
			delete(x.links, node)
			x.relinkAt = time.Time{}
			x.mu.Unlock()
			if err == nil && time.Since(begun) < time.Minute {
				err = errShort
			}
			if ctx.Err() == nil && err != nil {
				x.failed(node, false, err)
			}
			x.rouse()
		})
	}
}

// neighbours returns whose word is wanted, in an order that says nothing, and of
// which members; nil if it is not time to ask.
func (x *Exchange) neighbours(now time.Time) ([]Member, *roster) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.roster == nil || !x.known() || x.linked == x.roster && now.Before(x.relinkAt) {
		return nil, nil
	}
	var ms []Member
	for _, node := range x.roster.neighbours(x.node, "", x.avoided) {
		ms = append(ms, x.roster.byNode[node].Member)
	}
	rand.Shuffle(len(ms), func(i, j int) { ms[i], ms[j] = ms[j], ms[i] })
	return ms, x.roster
}

// errShort indicates a peer that ends each stream at once.
var errShort = errors.New("it ended the stream")

// errSilent indicates a peer that does not say what it knows.
var errSilent = errors.New("it did not say in time what it knows")

// listen takes what a peer tells until the stream ends. The error is nil if it
// ended as it should.
func (x *Exchange) listen(ctx context.Context, to Member, l *link) (err error) {
	outer := ctx
	ctx, cancel := context.WithCancelCause(ctx)
	var sending sync.WaitGroup
	defer sending.Wait()
	defer cancel(nil)
	age := time.AfterFunc(syncAge/2+rand.N(syncAge), func() { cancel(io.EOF) })
	defer age.Stop()
	silence := time.AfterFunc(syncBound, func() { cancel(errSilent) })
	defer silence.Stop()
	defer func() {
		if cause := context.Cause(ctx); cause != nil && outer.Err() == nil {
			err = cause
		}
		x.refused(err)
		x.metrics.asked("sync", ended(err))
		err = ended(err)
	}()

	stream, err := x.net.Sync(ctx, to)
	if err != nil {
		return err
	}
	x.mu.Lock()
	sums := &peerv1.SyncRequest{Sums: append([]uint64(nil), x.sums[:]...)}
	budget := int64(16<<20) + int64(len(x.records)+len(x.quests))*(16<<10)
	x.mu.Unlock()
	if err := stream.Send(sums); err != nil {
		return err
	}
	sending.Go(func() {
		for {
			select {
			case <-l.wake:
				for {
					req := x.takeWants(l)
					if len(req.GetFiles()) == 0 {
						break
					}
					if stream.Send(req) != nil {
						return // Recv says why
					}
				}
			case <-ctx.Done():
				return
			}
		}
	})
	complete, forgot := false, time.Now()
	for {
		resp, err := stream.Recv()
		if err != nil {
			return err
		}
		for _, r := range resp.GetRecords() {
			budget -= int64(proto.Size(r))
		}
		if budget -= int64(x.takeFiles(resp.GetFiles())); budget < 0 {
			return errTooMuch
		}
		if err := x.take(to.Node, resp.GetRecords()); err != nil {
			return err
		}
		now := time.Now()
		x.mu.Lock()
		x.contact(to.Node).last = now
		x.mu.Unlock()
		if now.Sub(forgot) > time.Minute {
			forgot = now
			x.mu.Lock()
			maps.DeleteFunc(l.asked, func(_ fileHash, at time.Time) bool { return now.Sub(at) > filesTime })
			x.mu.Unlock()
		}
		switch {
		case resp.GetComplete() && !complete:
			complete = true
			silence.Stop()
			x.worked(to.Node)
			x.mu.Lock()
			l.open, x.synced = true, true
			x.mu.Unlock()
			x.rouse()
		case !complete:
			silence.Reset(syncBound)
		}
	}
}

// ServeSync serves a peer's stream until it ends. The error is a gRPC status.
func (x *Exchange) ServeSync(from string, stream ServerStream) error {
	err := x.serveSync(from, stream)
	x.metrics.served("sync", status.Code(err))
	return err
}

func (x *Exchange) serveSync(from string, stream ServerStream) error {
	if err := x.enter(from); err != nil {
		return err
	}
	defer x.leave(from)
	req, err := stream.Recv()
	if err != nil {
		return err
	}
	if n := len(req.GetSums()); n != 0 && n != buckets {
		return status.Errorf(codes.InvalidArgument, "%d sums, not %d", n, buckets)
	}
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	wants := make(chan [][]byte)
	received := make(chan error, 1)
	go func() {
		for {
			req, err := stream.Recv()
			if err == nil && len(req.GetFiles()) > maxWant {
				err = status.Errorf(codes.InvalidArgument, "more than %d files", maxWant)
			}
			if err != nil {
				received <- err
				return
			}
			select {
			case wants <- req.GetFiles():
			case <-ctx.Done():
				return
			}
		}
	}()

	x.mu.Lock()
	differing := x.differing(req.GetSums())
	cursor := x.base + len(x.journal)
	x.mu.Unlock()
	if err := send(stream, differing, true); err != nil {
		return err
	}
	gather := time.NewTimer(pushDelay)
	gather.Stop()
	defer gather.Stop()
	for waiting := true; ; {
		x.mu.Lock()
		news, behind := x.news, x.base+len(x.journal)-cursor
		if behind > len(x.journal) {
			x.mu.Unlock()
			return status.Error(codes.Aborted, "the stream fell too far behind")
		}
		var batch []*Record
		if !waiting {
			batch = x.batch(from, cursor-x.base)
			cursor, waiting, behind = x.base+len(x.journal), true, 0
		}
		x.mu.Unlock()
		if err := send(stream, batch, false); err != nil {
			return err
		}
		if behind > 0 {
			news = nil
			gather.Reset(pushDelay)
		}
		select {
		case <-news:
		case <-gather.C:
			waiting = false
		case files := <-wants:
			if err := x.sendFiles(stream, files); err != nil {
				return err
			}
		case err := <-received:
			return ended(err)
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		}
	}
}

// enter counts a stream of a peer, if it may have one more.
func (x *Exchange) enter(from string) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	all := 0
	for _, c := range x.peers {
		all += c.streams
	}
	c := x.contact(from)
	if c.streams >= maxPeerStreams || all >= maxStreams {
		return status.Error(codes.ResourceExhausted, "too many streams are open")
	}
	c.streams++
	return nil
}

func (x *Exchange) leave(from string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.contact(from).streams--
}

// differing needs mu. It returns the records of the buckets that have other
// sums.
func (x *Exchange) differing(sums []uint64) []*Record {
	var out []*Record
	for key, r := range x.records {
		b := bucketOf(key)
		if len(sums) > 0 && sums[b] == x.sums[b] || len(sums) == 0 && x.sums[b] == 0 {
			continue
		}
		if hosts, _ := x.dir.Hosts(key); x.valid(r, hosts) {
			out = append(out, r)
		}
	}
	return out
}

// batch needs mu. It returns the records that came since, but for those that
// the peer has said itself or brought.
func (x *Exchange) batch(from string, at int) []*Record {
	var out []*Record
	for _, e := range x.journal[at:] {
		if e.via == from || e.rec.node == from || x.records[e.rec.key] != e.rec {
			continue
		}
		if hosts, _ := x.dir.Hosts(e.rec.key); x.valid(e.rec, hosts) {
			out = append(out, e.rec)
		}
	}
	return out
}

// send sends records in messages of about one chunk; the last of them says
// whether that was all that differed.
func send(stream ServerStream, records []*Record, complete bool) error {
	for len(records) > 0 || complete {
		resp := &peerv1.SyncResponse{}
		size := 0
		for len(records) > 0 && size < chunk {
			size += records[0].size
			resp.Records = append(resp.Records, records[0].raw)
			records = records[1:]
		}
		if complete && len(records) == 0 {
			resp.Complete, complete = true, false
		}
		if err := stream.Send(resp); err != nil {
			return err
		}
	}
	return nil
}

// sendFiles sends those of the files that are held.
func (x *Exchange) sendFiles(stream ServerStream, hashes [][]byte) error {
	resp := &peerv1.SyncResponse{}
	size := 0
	flush := func() error {
		if len(resp.Files) == 0 {
			return nil
		}
		err := stream.Send(resp)
		resp, size = &peerv1.SyncResponse{}, 0
		return err
	}
	for _, h := range hashes {
		x.mu.Lock()
		content, ok := x.file(h)
		x.mu.Unlock()
		if !ok {
			continue
		}
		if size+len(content) > maxMessage-chunk {
			if err := flush(); err != nil {
				return err
			}
		}
		resp.Files = append(resp.Files, &peerv1.File{Content: []byte(content)})
		size += len(content)
	}
	return flush()
}
