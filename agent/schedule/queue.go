package schedule

import (
	"container/list"
	"slices"
)

// queue holds the waiting jobs of one group. The scheduler's mu guards it.
type queue struct {
	levels []*level // highest priority first; none is empty
	size   int
}

// level is one priority: the namespaces that have jobs, the next one first.
type level struct {
	priority Priority
	turns    *list.List // of *lane
	lanes    map[string]*list.Element
}

// lane is what one namespace has waiting, oldest first; never empty.
type lane struct {
	namespace string
	jobs      *list.List // of *Job
}

func (q *queue) push(j *Job) {
	i, ok := slices.BinarySearchFunc(q.levels, j.priority, func(l *level, p Priority) int {
		return int(p) - int(l.priority)
	})
	if !ok {
		q.levels = slices.Insert(q.levels, i, &level{
			priority: j.priority, turns: list.New(), lanes: map[string]*list.Element{},
		})
	}
	l := q.levels[i]
	e := l.lanes[j.namespace]
	if e == nil {
		e = l.turns.PushBack(&lane{namespace: j.namespace, jobs: list.New()})
		l.lanes[j.namespace] = e
	}
	j.place = e.Value.(*lane).jobs.PushBack(j)
	q.size++
}

// pop takes the next job; the namespace of the job goes to the end of the
// line. It returns nil if none waits.
func (q *queue) pop() *Job {
	if q.size == 0 {
		return nil
	}
	l := q.levels[0]
	turn := l.turns.Front()
	j := turn.Value.(*lane).jobs.Front().Value.(*Job)
	l.turns.MoveToBack(turn)
	q.remove(j)
	return j
}

func (q *queue) remove(j *Job) {
	i := slices.IndexFunc(q.levels, func(l *level) bool { return l.priority == j.priority })
	l := q.levels[i]
	turn := l.lanes[j.namespace]
	jobs := turn.Value.(*lane).jobs
	jobs.Remove(j.place)
	j.place = nil
	q.size--
	if jobs.Len() == 0 {
		l.turns.Remove(turn)
		delete(l.lanes, j.namespace)
	}
	if l.turns.Len() == 0 {
		q.levels = slices.Delete(q.levels, i, i+1)
	}
}

// leastNeeded returns the oldest job of the lowest priority, nil if none
// waits.
func (q *queue) leastNeeded() *Job {
	if q.size == 0 {
		return nil
	}
	var oldest *Job
	l := q.levels[len(q.levels)-1]
	for e := l.turns.Front(); e != nil; e = e.Next() {
		if j := e.Value.(*lane).jobs.Front().Value.(*Job); oldest == nil || j.order < oldest.order {
			oldest = j
		}
	}
	return oldest
}
