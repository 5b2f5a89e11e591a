-- One turn of a pool's shared queue: controlplane.admission.queue.SharedQueue.turn inside Redis, step by step.
-- KEYS: meta, served, requests, gateways, queue, owned, unseen, held, idle, and the backlogs of the lines.
-- ARGV[1]: a Turn (msgpack). Returns a TurnAnswer (msgpack). Loops are bounded by the message and the limits below.
local DEAD_S, IDLE_S, MAX_REQUESTS, MAX_GRANTS, REAPED = 10, 600, 65536, 64, 64
local BANDS, KEEP_S = 4, 86400
local META, SERVED, REQUESTS, GATEWAYS, QUEUE, OWNED, UNSEEN, HELD, IDLE = unpack(KEYS, 1, 9)
local call = redis.call

local function exact(number) return string.format('%.17g', number) end
local function backlog(line) return KEYS[10 + line] end
local function member(line, tenant) return line .. tenant end

local gateway, number, fresh, rules, arrivals, charges, ended, seen = unpack(cmsgpack.unpack(ARGV[1]), 1, 8)
local slots, tokens, long_slots, long_tokens, long_reserve, floors = unpack(rules, 1, 6)
local time = call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000

local meta = {}
do
  local flat = call('HGETALL', META)
  for i = 1, #flat, 2 do meta[flat[i]] = flat[i + 1] end
end
if next(meta) == nil then -- what is left of an expired or evicted queue has no counts any more: all tell it anew
  call('UNLINK', unpack(KEYS, 2))
end
local function get(field) return tonumber(meta[field] or 0) end
local changed = {}
local function set(field, value)
  meta[field] = value
  changed[field] = true
end

local heard = call('ZSCORE', GATEWAYS, gateway)
if not fresh and not (heard and tonumber(heard) >= now - DEAD_S) then
  return cmsgpack.pack({get('sequence'), now, true, {}, {}, {}, 0, 0, 0, 0})
end
set('sequence', get('sequence') + 1)
call('ZADD', GATEWAYS, exact(now), gateway)

-- A tenant's queue is a range of QUEUE by name: line, tenant, deadline, request.
local function prefix(line, tenant) return line .. tenant .. '\0' end
local function place(arrival) return prefix(arrival[2], arrival[3]) .. string.format('%015d', arrival[4]) .. '\0' .. arrival[1] end
local function first(line, tenant) return call('ZRANGEBYLEX', QUEUE, '[' .. prefix(line, tenant), '(' .. line .. tenant .. '\1', 'LIMIT', 0, 1)[1] end
local function waits(line, tenant) return call('ZSCORE', backlog(line), tenant) end

-- How many tenants wait in a line.
local function tenants(line) return get('tenants' .. line) end

local function floor_of(line)
  if tenants(line) > 0 then return tonumber(call('ZRANGE', backlog(line), 0, 0, 'WITHSCORES')[2]) end
  local last = meta['last' .. line]
  return tonumber(last and call('HGET', SERVED, member(line, last)) or 0)
end

local function set_served(line, tenant, value)
  call('HSET', SERVED, member(line, tenant), exact(value))
  if tenants(line) > 0 then call('ZADD', backlog(line), 'XX', exact(value), tenant) end
end

local function rest(line, tenant)
  if not waits(line, tenant) and call('HEXISTS', HELD, member(line, tenant)) == 0 then
    call('ZADD', IDLE, exact(now), member(line, tenant))
  end
end

local function hold(arrival)
  local lane = math.floor(arrival[2] / BANDS)
  set('slots' .. lane, get('slots' .. lane) + 1)
  set('tokens' .. lane, get('tokens' .. lane) + arrival[5])
  call('HINCRBY', HELD, member(arrival[2], arrival[3]), 1)
end

local function dequeue(arrival)
  local line, tenant = arrival[2], arrival[3]
  call('ZREM', QUEUE, place(arrival))
  if first(line, tenant) then return end
  set('last' .. line, tenant)
  set('tenants' .. line, tenants(line) - 1)
  call('ZREM', backlog(line), tenant)
  if tenants(line) == 0 then set('owed' .. line, 0) end
end

-- A stored request: the arrival, its gateway, and the tag of its dispatch once it had one.
local function stored(request)
  local found = call('HGET', REQUESTS, request)
  return found and cmsgpack.unpack(found)
end

local function finish(request, entry)
  local arrival = entry[1]
  local line, tenant = arrival[2], arrival[3]
  if entry[3] then
    local lane = math.floor(line / BANDS)
    set('slots' .. lane, get('slots' .. lane) - 1)
    set('tokens' .. lane, get('tokens' .. lane) - arrival[5])
    if call('HINCRBY', HELD, member(line, tenant), -1) == 0 then call('HDEL', HELD, member(line, tenant)) end
  else
    dequeue(arrival)
  end
  call('ZREM', OWNED, entry[2] .. '\0' .. request)
  call('ZREM', UNSEEN, entry[2] .. '\0' .. request)
  call('HDEL', REQUESTS, request)
  rest(line, tenant)
end

local function of(key, owner, count)
  local names = call('ZRANGEBYLEX', key, '[' .. owner .. '\0', '(' .. owner .. '\1', 'LIMIT', 0, count)
  for i, name in ipairs(names) do names[i] = string.sub(name, #owner + 2) end
  return names
end

-- Gateways that fell silent leave.
local left = REAPED
for _, dead in ipairs(call('ZRANGEBYSCORE', GATEWAYS, '-inf', '(' .. exact(now - DEAD_S), 'LIMIT', 0, REAPED)) do
  if left == 0 then break end
  local requests = of(OWNED, dead, left)
  for _, request in ipairs(requests) do finish(request, stored(request)) end
  left = left - #requests
  if #of(OWNED, dead, 1) == 0 then
    call('ZREM', GATEWAYS, dead)
    call('HDEL', META, 'number:' .. dead)
    meta['number:' .. dead], changed['number:' .. dead] = nil, nil
  end
end
local reaping = call('ZCOUNT', GATEWAYS, '-inf', '(' .. exact(now - DEAD_S)) > 0

-- Service, once for each message.
if number > get('number:' .. gateway) then
  set('number:' .. gateway, number)
  for _, service in ipairs(charges) do
    local line, tenant, charge = unpack(service)
    local served = call('HGET', SERVED, member(line, tenant))
    if not served then
      served = floor_of(line)
      rest(line, tenant)
    end
    served = tonumber(served)
    if tenants(line) == 0 then
      served = math.max(served, floor_of(line))
      set('last' .. line, tenant)
    end
    set_served(line, tenant, served + charge)
  end
end

for _, request in ipairs(ended) do
  local entry = stored(request)
  if entry and entry[2] == gateway then finish(request, entry) end
end

local function waiting_lines(lane)
  local lines = {}
  for line = lane * BANDS, lane * BANDS + BANDS - 1 do
    if tenants(line) > 0 then lines[#lines + 1] = line end
  end
  return lines
end

local function fits(lane, need)
  if slots == 0 then return false end
  if get('slots' .. lane) == 0 then return true end
  if lane == 1 and (get('slots1') >= long_slots or get('tokens1') + need > long_tokens) then return false end
  local kept = 0
  if lane == 0 and #waiting_lines(1) > 0 then kept = math.max(0, long_reserve - get('tokens1')) end
  return get('slots0') + get('slots1') < slots and get('tokens0') + get('tokens1') + need + kept <= tokens
end

-- Record a dispatch, of which `served` is the tag.
local function grant(arrival, owner, served)
  local request, line, tenant = arrival[1], arrival[2], arrival[3]
  hold(arrival)
  set_served(line, tenant, served + arrival[6])
  call('HSET', REQUESTS, request, cmsgpack.pack({arrival, owner, served}))
  call('ZADD', UNSEEN, 0, owner .. '\0' .. request)
end

-- Whether one that arrives alone may go without having stood in the queue: what is left is the same.
local function at_once(arrival)
  return #arrivals == 1 and not arrival[7] and #waiting_lines(0) + #waiting_lines(1) == 0
    and fits(math.floor(arrival[2] / BANDS), arrival[5])
end

local refused = {}
local count = call('HLEN', REQUESTS)
for _, arrival in ipairs(arrivals) do
  local request, line, tenant = arrival[1], arrival[2], arrival[3]
  local known = stored(request)
  if known and known[2] ~= gateway then -- its gateway tells it anew under a new name
    finish(request, known)
    known, count = nil, count - 1
  end
  if known then
    -- a repeat
  elseif count >= MAX_REQUESTS then
    refused[#refused + 1] = request
  else
    count = count + 1
    local held = arrival[7]
    call('ZADD', OWNED, 0, gateway .. '\0' .. request)
    call('ZREM', IDLE, member(line, tenant))
    local served = tonumber(call('HGET', SERVED, member(line, tenant)) or floor_of(line))
    if at_once(arrival) then
      served = math.max(served, floor_of(line))
      set('last' .. line, tenant)
      set('owed' .. line, 0)
      grant(arrival, gateway, served)
    elseif held then
      call('HSET', REQUESTS, request, cmsgpack.pack({arrival, gateway, 0}))
      hold(arrival)
      call('HSET', SERVED, member(line, tenant), exact(served))
    else
      call('HSET', REQUESTS, request, cmsgpack.pack({arrival, gateway, false}))
      if not waits(line, tenant) then
        served = math.max(served, floor_of(line))
        call('HSET', SERVED, member(line, tenant), exact(served))
        set('tenants' .. line, tenants(line) + 1)
        call('ZADD', backlog(line), exact(served), tenant)
      end
      call('ZADD', QUEUE, 0, place(arrival))
    end
  end
end

for _, request in ipairs(seen) do call('ZREM', UNSEEN, gateway .. '\0' .. request) end

-- Dispatch while there is room.
local function head(line)
  local tenant = call('ZRANGE', backlog(line), 0, 0)[1]
  local name = first(line, tenant)
  local request = string.sub(name, #tenant + 19)
  return request, stored(request)
end

local function next_head(lines)
  for i = 2, #lines do
    local line = lines[i]
    if floors[line % BANDS + 1] > 0 and get('owed' .. line) > 0 then
      local request, entry = head(line)
      if get('owed' .. line) >= entry[1][5] then return request, entry end
    end
  end
  return head(lines[1])
end

local poked, told = {}, {}
left = MAX_GRANTS
for lane = 0, 1 do
  while left > 0 do
    local lines = waiting_lines(lane)
    if #lines == 0 then break end
    local _, entry = next_head(lines)
    local arrival, owner = entry[1], entry[2]
    if not fits(lane, arrival[5]) then break end
    local line, tenant = arrival[2], arrival[3]
    for i = 2, #lines do
      if lines[i] ~= line then
        set('owed' .. lines[i], get('owed' .. lines[i]) + floors[lines[i] % BANDS + 1] * arrival[5])
      end
    end
    set('owed' .. line, math.max(0, get('owed' .. line) - arrival[5]))
    local served = tonumber(call('HGET', SERVED, member(line, tenant)))
    dequeue(arrival)
    grant(arrival, owner, served)
    if owner ~= gateway and not told[owner] then
      told[owner] = true
      poked[#poked + 1] = owner
    end
    left = left - 1
  end
end
table.sort(poked)
for _, owner in ipairs(poked) do call('PUBLISH', META .. ':' .. string.match(owner, '^[^#]*'), '') end

-- Forget who was idle for long and could come back with nothing but the floor.
for _, name in ipairs(call('ZRANGEBYSCORE', IDLE, '-inf', exact(now - IDLE_S), 'LIMIT', 0, REAPED)) do
  local line, tenant = tonumber(string.sub(name, 1, 1)), string.sub(name, 2)
  if tonumber(call('HGET', SERVED, name)) <= floor_of(line) and meta['last' .. line] ~= tenant then
    call('ZREM', IDLE, name)
    call('HDEL', SERVED, name)
  else
    call('ZADD', IDLE, exact(now), name)
  end
end

local fields = {}
for field in pairs(changed) do
  local value = meta[field]
  fields[#fields + 1] = field
  fields[#fields + 1] = type(value) == 'number' and exact(value) or value
end
call('HSET', META, unpack(fields))
if get('sequence') % 64 == 1 then
  for _, key in ipairs(KEYS) do call('EXPIRE', key, KEEP_S) end
end

local grants = {}
for _, request in ipairs(of(UNSEEN, gateway, MAX_GRANTS)) do
  grants[#grants + 1] = {request, stored(request)[3]}
end
local used_slots = get('slots0') + get('slots1')
return cmsgpack.pack({
  get('sequence'), now, false, grants, refused, poked,
  call('HLEN', REQUESTS) - used_slots, used_slots, get('tokens0') + get('tokens1'), call('ZCARD', GATEWAYS), get('slots1'),
  reaping,
})
